"""What the program prints."""

from collections import Counter

from jaxdp.assemble import check_names, load_data
from jaxdp.checking.lines import text
from jaxdp.checking.run import run_check
from jaxdp.checking.subject import subject_of
from jaxdp.choosing import choose_algorithm
from jaxdp.config import Config, check_devices
from jaxdp.errors import Exit, UserError
from jaxdp.mesh import use_devices
from jaxdp.wording import counted

_CPU_DEVICES = 4  # emulated where nothing is said and there is only the CPU


def check_and_tell(config: Config) -> int:
    """Checks a configuration; returns the exit code.

    Raises:
      UserError: the data or the devices do not fit.
    """
    dataset = load_data(config)
    check_names(config, dataset)
    devices = use_devices(config.devices, cpu_default=_CPU_DEVICES)
    if mistakes := check_devices(config, len(devices)):
        raise UserError(*mistakes)
    if len(devices) < 2:
        raise UserError("devices: 1; expected at least 2, to be held against one: --devices 4")
    shards = config.sync.logical_shards
    choice = choose_algorithm(config, dataset, devices)
    subject = subject_of(config, dataset, devices, choice.algorithm)
    local_steps = config.sync.local_steps
    emulated = "emulated " if devices[0].platform == "cpu" else ""
    print(
        f"{config.model.kind} on {dataset.name}: {len(devices)} {emulated}devices against 1; "
        f"{subject.size} of {config.global_batch} examples a step, "
        f"{counted(config.microbatches, 'microbatch')}, "
        + (f"{local_steps} local steps, " if local_steps is not None else "")
        + (
            f"sync {choice.algorithm}: {choice.reason}"
            if shards is None
            else f"sync in {shards} logical shards"
        ),
        flush=True,
    )
    lines = run_check(subject, devices, lambda line: print(text(line), flush=True))
    count = Counter(line.verdict for line in lines)
    same = "the same training" if subject.other_algorithm is None else "the training it is to be"
    if count["fail"]:
        same = "NOT " + same
    print(f"{same}: {count['pass']} passed, {count['fail']} failed, {count['n/a']} not applicable")
    return Exit.FAULT_FOUND if count["fail"] else Exit.DONE

"""What a run says of itself before it starts."""

import jax

import jaxdp
from jaxdp import hlo
from jaxdp.assemble import Job, what_travels
from jaxdp.collectives.tuning import Choice
from jaxdp.config import Config, describe_batch
from jaxdp.optim import describe_decay
from jaxdp.runtime.control import control_folder
from jaxdp.state import TrainState
from jaxdp.trees import bytes_per_device, count_bytes, count_elements
from jaxdp.wording import counted, emulated_devices


def introduction(config: Config, job: Job, state: TrainState, choice: Choice) -> list[str]:
    """The lines before the first step: devices, data, model, batch, synchronisation."""
    devices = list(job.mesh.devices.flat)
    n, platform = len(devices), devices[0].platform
    kind = "CPU" if platform == "cpu" else devices[0].device_kind
    processes = jax.process_count()
    where = counted(n, f"{kind} device")
    if platform == "cpu" and n > processes:
        where = emulated_devices(n, processes)
    elif processes > 1:
        where += f" in {processes} processes"
    dataset = job.dataset
    what = "gradients" if config.sync.local_steps is None else "changes made by local steps"
    lines = [
        f"jaxdp {jaxdp.__version__}, jax {jax.__version__}, {where}",
        f"data   {dataset.name}: {len(dataset.train):,} examples, "
        f"{len(dataset.heldout):,} held out",
        f"model  {config.model.kind}: {count_elements(state.params):,} parameters, "
        f"{hlo.format_bytes(count_bytes(state.params))}, compute in {config.compute_dtype}",
        f"batch  {describe_batch(config, n)}",
        f"sync   {choice.algorithm}: {hlo.format_bytes(count_bytes(state.params))} of {what}, "
        f"{what_travels(config)} on the wire; {choice.reason}",
    ]
    if job.step.peeled:
        lines.append("peeled the last microbatch is behind the loop, compiled a second time")
    if config.sync.shard_optimizer:
        held = hlo.format_bytes(bytes_per_device(state.opt_state))
        lines.append(f"zero   the optimizer's state is shared out: {held} on each device")
    if config.optimizer.freeze:
        lines.append(f"frozen {', '.join(config.optimizer.freeze)}")
    if getattr(config.optimizer, "weight_decay", 0):
        lines += describe_decay(state.params)
    if config.init_from is not None and not int(state.step):
        lines.append(f"init   parameters from {config.init_from}")
    if control_folder() is not None and not config.checkpoint.every:
        lines.append(
            "warning: checkpoint.every is 0: nothing is saved before the end, restarts begin anew"
        )
    if int(state.step):
        lines.append(f"resumed at step {int(state.step)} of {config.steps}")
    return lines

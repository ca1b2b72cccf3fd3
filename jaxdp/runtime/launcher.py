"""The launcher of one host: attempts, one after the other, until the job is done or given up."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxdp.errors import Exit, UserError
from jaxdp.runtime.attempt import Ending, Job, run_attempt
from jaxdp.runtime.children import Janitor, World, cores, free_port, hired_janitor, shares
from jaxdp.runtime.launch_options import LaunchOptions
from jaxdp.runtime.output import Output
from jaxdp.runtime.phases import EVALUATION, SAVE, STEP
from jaxdp.runtime.place import LOCAL_DEVICES
from jaxdp.runtime.requests import Requests, noted_requests
from jaxdp.runtime.restarting import Decision, End, History, Rules, decide
from jaxdp.wording import counted

TRAINER = "jaxdp.train"
_LOOPBACK = "127.0.0.1"
_ACCELERATORS = ("nvidiactl", "kfd", "accel0", "vfio")  # in /dev: GPUs of two makers, TPUs
_CHOSEN = {"CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES", LOCAL_DEVICES}


def launch(options: LaunchOptions) -> int:
    """Starts the processes of this host and sees them to their end.

    Returns:
      The exit code: the job's, or what became of it.

    Raises:
      UserError: the log folder cannot be used.
    """
    with noted_requests() as requests, _output() as output, hired_janitor() as hired:
        mark, janitor = hired
        if options.nnodes > 1 and options.node_rank == 0:
            output.say(
                f"launch: the coordinator {options.coordinator} asks for no password: let nobody "
                "but the job's hosts reach this port"
            )
        with _folder(options.log_dir, janitor) as folder:
            return _attempts(options, folder, mark, output, requests, janitor)


def _attempts(
    options: LaunchOptions,
    folder: Path,
    mark: str,
    output: Output,
    requests: Requests,
    janitor: Janitor,
) -> int:
    rules = Rules(options.max_restarts, options.nproc, options.min_nproc)
    history = History(options.nproc)
    beats = options.module == TRAINER
    attempt = 0
    while True:
        control = _attempt_folder(folder)
        job = _job(options, attempt, beats, mark)
        ending = run_attempt(
            job, _world(options, history.nproc, control, attempt), output, requests, janitor
        )
        beats = ending.beats
        _tell(output, ending, control if options.log_dir else None)
        if requests.number is not None or ending.code in (Exit.DONE, Exit.SAVED):
            return ending.code
        decision = decide(rules, history, _end(ending))
        if decision.delay_s is None:
            if decision.why:
                output.say(f"launch: given up: {decision.why}")
            return ending.code
        history, attempt = decision.history, attempt + 1
        output.say(f"launch: {_restart(options, history.nproc, attempt, decision)}")
        _wait(decision.delay_s, requests)
        if requests.number is not None:
            output.say(f"launch: {requests.reason}: not restarted")
            return 128 + requests.number


def _end(ending: Ending) -> End:
    told = ending.told
    place = (told.phase, told.step) if told else (None, None)
    return End(ending.code, *place, ending.farthest)


def _tell(output: Output, ending: Ending, logs: Path | None) -> None:
    held = output.release()
    if ending.told is None:
        return
    output.say(ending.told.line)
    if ending.told.details:
        output.say(ending.told.details)
    if ending.code == Exit.USER:
        return
    if logs is not None:
        output.say(f"launch: all that the ranks wrote is in {logs}")
    elif held:
        output.say(f"launch: held back of all ranks: {counted(held, 'line')}; --log-dir keeps them")


def _restart(options: LaunchOptions, nproc: int, attempt: int, decision: Decision) -> str:
    whence = " from the last checkpoint" if options.module == TRAINER else ""
    many = f" with {nproc} processes" if nproc < options.nproc else ""
    when = f" in {decision.delay_s:g} s" if decision.delay_s else ""
    return f"restart {attempt}{whence}{many}{when} ({decision.why})"


def _wait(seconds: float, requests: Requests) -> None:
    deadline = time.monotonic() + seconds
    while requests.number is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _job(options: LaunchOptions, attempt: int, beats: bool, mark: str) -> Job:
    arguments = options.arguments
    if options.module == TRAINER:
        arguments = resuming(arguments, attempt)
    command = [sys.executable, "-m", options.module, *arguments]
    logs = options.log_dir is not None
    deadlines = options.deadlines
    if options.nnodes > 1:
        deadlines = deadlines_of_several_hosts(deadlines)
    return Job(command, beats, deadlines, options.grace_s, mark, logs)


def deadlines_of_several_hosts(deadlines: Mapping[str, float]) -> dict[str, float]:
    """A rank may wait in a step for one of another host that saves, which is not seen from here."""
    waiting = (STEP, EVALUATION, SAVE)
    return dict(deadlines) | dict.fromkeys(waiting, max(deadlines[phase] for phase in waiting))


def resuming(arguments: Sequence[str], attempt: int) -> list[str]:
    """The trainer's arguments with `--resume auto`: always after a restart, else as default.

    >>> resuming(["--steps", "9"], 0), resuming(["--resume", "false", "--steps=9"], 1)
    (['--steps', '9', '--resume', 'auto'], ['--steps=9', '--resume', 'auto'])
    """
    kept, given, rest = [], False, list(arguments)
    while rest:
        word = rest.pop(0)
        if word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
            continue
        given = True
        if word == "--resume" and rest and not rest[0].startswith("--"):
            rest.pop(0)
    return list(arguments) if given and attempt == 0 else [*kept, "--resume", "auto"]


def _world(options: LaunchOptions, nproc: int, control: Path, attempt: int) -> World:
    address = options.coordinator or f"{_LOOPBACK}:{free_port(_LOOPBACK)}"
    # on several hosts, the one that the coordinator's name stands for
    bind = options.coordinator_bind or (_LOOPBACK if options.coordinator is None else None)
    return World(
        size=nproc * options.nnodes,
        first=nproc * options.node_rank,
        local=nproc,
        address=address,
        bind=bind,
        control=control,
        attempt=attempt,
        cores=_cores(options.pin, nproc),
        devices=_devices(nproc),
    )


def _cores(pin: str, nproc: int) -> tuple[tuple[int, ...], ...]:
    """The cores of each process: XLA sizes its thread pools by them, and pools on all fight."""
    if pin == "off" or (pin == "auto" and (nproc == 1 or not _computes_on_cpu())):
        return ()
    return shares(cores(), nproc)


def _devices(nproc: int) -> tuple[tuple[int, ...], ...]:
    """Each process's share of NVIDIA's GPUs, all of which JAX would take in each, unless chosen."""
    if nproc == 1 or _CHOSEN & os.environ.keys() or _computes_on_cpu():
        return ()
    return shares(range(len(list(Path("/dev").glob("nvidia[0-9]*")))), nproc)


def _computes_on_cpu() -> bool:
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not any(os.path.exists(f"/dev/{name}") for name in _ACCELERATORS)


@contextlib.contextmanager
def _output() -> Iterator[Output]:
    output = Output()
    try:
        yield output
    finally:
        output.close()


@contextlib.contextmanager
def _folder(log_dir: str | None, janitor: Janitor) -> Iterator[Path]:
    """The folder of all attempts: the user's, or a temporary one that is removed."""
    if log_dir is not None:
        yield Path(log_dir)
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="jaxdp-launch-"))
    except OSError as error:
        raise UserError(
            f"{tempfile.gettempdir()}: no temporary folder can be made: {error.strerror}; set "
            "TMPDIR, or give --log-dir"
        ) from None
    janitor.note("folder", folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _attempt_folder(folder: Path) -> Path:
    """A new folder `attempt-K`: of earlier launches with the same --log-dir, none is touched."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [path.name.removeprefix("attempt-") for path in folder.glob("attempt-*")]
        last = max((int(number) for number in numbers if number.isdigit()), default=-1)
        found = folder / f"attempt-{last + 1}"
        found.mkdir()
    except OSError as error:
        raise UserError(f"--log-dir: {folder} cannot be used: {error.strerror}") from None
    return found.resolve()

"""The launcher of one host: attempts, one after the other, until the job is done or given up."""

import contextlib
import ipaddress
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxdp.errors import Exit
from jaxdp.runtime.attempt import Ending, Job, run_attempt
from jaxdp.runtime.children import Janitor, World, cores, free_port, hired_janitor, shares
from jaxdp.runtime.folders import Folders, attempt_folders
from jaxdp.runtime.launch_options import DEADLINES, LaunchOptions
from jaxdp.runtime.output import Output
from jaxdp.runtime.phases import EVALUATION, SAVE, STEP
from jaxdp.runtime.place import chooses_devices, visible_devices
from jaxdp.runtime.requests import Requests, noted_requests
from jaxdp.runtime.restarting import Decision, End, History, Rules, decide
from jaxdp.wording import counted

TRAINER = "jaxdp.train"
_LOOPBACK = "127.0.0.1"
_ACCELERATORS = ("nvidiactl", "kfd", "accel0", "vfio")  # in /dev: GPUs of two makers, TPUs


def launch(options: LaunchOptions) -> int:
    """Starts the processes of this host and sees them to their end.

    Returns:
      The exit code: the job's, or what became of it.

    Raises:
      UserError: the log folder cannot be used.
    """
    with noted_requests() as requests, _output() as output, hired_janitor() as hired:
        mark, janitor = hired
        for line in filter(None, (_warning(options), ineffective(options), _gpus_line(options))):
            output.say(f"launch: {line}")
        with attempt_folders(options.log_dir, janitor, output.say) as folders:
            return _attempts(options, folders, mark, output, requests, janitor)


def _warning(options: LaunchOptions) -> str | None:
    """What is to be known of the coordinator of several hosts."""
    if options.nnodes == 1 or options.coordinator is None:
        return None
    if is_loopback_form(options.coordinator):
        return (
            f"warning: the coordinator {options.coordinator} is each host itself: launchers on "
            "other hosts cannot reach it; give an address of host 0 that all of them reach"
        )
    if options.node_rank == 0:
        return (
            f"the coordinator {options.coordinator} asks for no password: let nobody but the job's "
            "hosts reach this port"
        )
    return None


def ineffective(options: LaunchOptions) -> str | None:
    """The deadlines that were chosen for a program that may send no heartbeats, in a line.

    The trainer sends them; of others we learn it from their first one.
    """
    chosen = [
        f"--{phase}-deadline"
        for phase, (seconds, _) in DEADLINES.items()
        if options.deadlines[phase] != seconds
    ]
    if options.module == TRAINER or not chosen:
        return None
    what = f"{', '.join(chosen)}: without effect unless {options.module} sends heartbeats"
    return f"{what}, as {TRAINER} does"


def is_loopback_form(address: str) -> bool:
    """Whether HOST:PORT names its own host, wherever it is read; asks no name server.

    >>> is_loopback_form("[::1]:80"), is_loopback_form("localhost:80"), is_loopback_form("n1:80")
    (True, True, False)
    """
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def _attempts(
    options: LaunchOptions,
    folders: Folders,
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
        control, kept = folders.of_attempt(attempt)
        job = _job(options, attempt, beats, mark, kept)
        ending = run_attempt(
            job, _world(options, history.nproc, control, attempt), output, requests, janitor
        )
        beats = ending.beats
        _tell(output, ending, control if kept else None)
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


def _job(options: LaunchOptions, attempt: int, beats: bool, mark: str, logs: bool) -> Job:
    arguments = options.arguments
    if options.module == TRAINER:
        arguments = resuming(arguments, attempt)
    command = [sys.executable, "-m", options.module, *arguments]
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
    if nproc == 1 or _computes_on_cpu():
        return ()
    return device_shares(os.environ, _present_gpus(), nproc)


def device_shares(
    environ: Mapping[str, str], present: int, nproc: int
) -> tuple[tuple[int, ...], ...]:
    """Each process's share of the GPUs, all of which JAX would take in each, unless chosen.

    JAX counts those that it may see: `present`, NVIDIA's of this host, or as many as are listed.

    >>> device_shares({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 8, 2)
    ((0, 1), (2, 3))
    """
    return () if chooses_devices(environ) else shares(range(_count(environ, present)), nproc)


def _count(environ: Mapping[str, str], present: int) -> int:
    """The GPUs that a process may see."""
    visible = visible_devices(environ)
    return present if visible is None else len(visible)


def uneven_gpus(environ: Mapping[str, str], present: int, nproc: int) -> str | None:
    """A line where GPUs and processes do not come out even; None where they do, or none are seen.

    >>> uneven_gpus({}, 8, 3)
    '8 GPUs for 3 processes: each gets 2, and 2 are left over'
    """
    gpus = 0 if chooses_devices(environ) else _count(environ, present)
    if not gpus or gpus % nproc == 0:
        return None
    what = f"{counted(gpus, 'GPU')} for {counted(nproc, 'process')}"
    if gpus < nproc:
        return f"warning: {what}: each sees all; expected at most one process for each GPU"
    each, left = divmod(gpus, nproc)
    return f"{what}: each gets {each}, and {left} {'is' if left == 1 else 'are'} left over"


def _gpus_line(options: LaunchOptions) -> str | None:
    if options.nproc == 1 or _computes_on_cpu():
        return None
    return uneven_gpus(os.environ, _present_gpus(), options.nproc)


def _present_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


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

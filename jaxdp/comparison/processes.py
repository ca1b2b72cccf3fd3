"""Several processes on this machine, joined by JAX's own distributed runtime over loopback."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from jaxdp.errors import Exit
from jaxdp.runtime.children import Crew, cores, crew, free_port, hired_janitor
from jaxdp.runtime.failing import exit_status
from jaxdp.runtime.reaping import MARK
from jaxdp.runtime.requests import Requests, noted_requests

_RANK, _SIZE, _ADDRESS = "JAXDP_COMPARE_RANK", "JAXDP_COMPARE_SIZE", "JAXDP_COMPARE_ADDRESS"
_CORE = "JAXDP_COMPARE_CORE"
_GRACE_S = 5.0
_VICTIMS_S = 0.5


def rank() -> int | None:
    """The number of this process among those that `run_processes` started; None outside."""
    text = os.environ.get(_RANK)
    return None if text is None else int(text)


def join(devices: int) -> None:
    """Joins the other processes, with so many devices in each; called before JAX starts."""
    if core := os.environ.get(_CORE):
        # XLA sizes its thread pool by the cores it may use: two pools on all cores fight
        os.sched_setaffinity(0, {int(core)})
    import jax  # only the started processes need it

    # Gloo writes its greetings to standard output, where our table goes: give it the other stream
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = os.environ[_ADDRESS]
    jax.distributed.initialize(
        address,
        int(os.environ[_SIZE]),
        int(os.environ[_RANK]),
        coordinator_bind_address=address,  # loopback; by default it listens on all interfaces
        initialization_timeout=60,
    )


def run_processes(module: str, argv: Sequence[str], nproc: int) -> int:
    """Runs `python -m module argv` as `nproc` CPU processes, one core each where there are enough.

    Process 0 writes to this terminal.  When one fails, the others are ended and what they wrote to
    their error streams is shown.

    Returns:
      The exit code of the first that failed, or 0; 128 + the signal's number if one asked to end.
    """
    with (
        noted_requests() as requests,
        hired_janitor() as (mark, janitor),
        crew(mark, janitor) as started,
        contextlib.ExitStack() as files,
    ):
        # of the processes after the first: files and not pipes, which nobody would read
        errors = {r: files.enter_context(tempfile.TemporaryFile("w+")) for r in range(1, nproc)}
        command = [sys.executable, "-m", module, *argv]
        for r, names in enumerate(_environments(nproc)):
            out = subprocess.DEVNULL if r else None
            started.start(r, command, os.environ | names | {MARK: mark}, out, errors.get(r))
        code = _wait(started, requests)
        if code not in (Exit.DONE, 128 + (requests.number or 0)):
            # the one that failed first may not be the first that is seen: its peers fail too
            time.sleep(_VICTIMS_S)
            for child in started.children:
                if child.poll() and child.rank in errors:
                    errors[child.rank].seek(0)
                    _report(child.rank, errors[child.rank].read())
        return code


def _environments(nproc: int) -> Iterator[dict[str, str]]:
    """What each process is told."""
    address, here = f"127.0.0.1:{free_port()}", cores()
    for r in range(nproc):
        names = {_RANK: str(r), _SIZE: str(nproc), _ADDRESS: address, "JAX_PLATFORMS": "cpu"}
        yield names | ({_CORE: str(here[r % len(here)])} if here else {})


def _wait(started: Crew, requests: Requests) -> int:
    """Until all have ended, one has failed, or a signal asks for the end, which gets a grace."""
    while requests.number is None:
        codes = [child.poll() for child in started.children]
        if failed := [code for code in codes if code]:
            return exit_status(failed[0])
        if all(code == 0 for code in codes):
            return Exit.DONE
        time.sleep(0.02)
    print(f"{requests.reason}: ended", file=sys.stderr)
    for child in started.children:
        child.send(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while any(child.poll() is None for child in started.children) and not requests.at_once:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return 128 + requests.number


def _report(rank: int, text: str) -> None:
    if text:
        print(f"process {rank}:\n{text}", file=sys.stderr, end="")

"""Several processes on this machine, joined by JAX's own distributed runtime over loopback."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from jaxdp.errors import Exit, UserError

_RANK, _SIZE, _ADDRESS = "JAXDP_COMPARE_RANK", "JAXDP_COMPARE_SIZE", "JAXDP_COMPARE_ADDRESS"
_CORE = "JAXDP_COMPARE_CORE"
_GRACE_S = 5.0
_VICTIMS_S = 0.5
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def check_count(nproc: int) -> None:
    """Raises UserError for a number of processes that this machine cannot hold."""
    most = max(16, 4 * (os.cpu_count() or 1))
    if not 1 <= nproc <= most:
        raise UserError(
            f"--nproc-per-node: {nproc} processes on {os.cpu_count()} cores; expected 1 to {most}"
        )


def rank() -> int | None:
    """The number of this process among those that `run_processes` started; None outside."""
    text = os.environ.get(_RANK)
    return None if text is None else int(text)


def join(devices: int) -> None:
    """Joins the other processes, with so many devices in each; called before JAX starts."""
    _end_with_parent()
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
      The exit code of the first that failed, or 0.
    """
    address = f"127.0.0.1:{_free_port()}"
    with _ended_on_leaving() as children, _signals_raise():
        for r in range(nproc):
            children.append(_Child(module, argv, r, nproc, address))
        while True:
            codes = [child.process.poll() for child in children]
            if failed := [code for code in codes if code]:
                # the one that failed first may not be the first that is seen: its peers fail too
                time.sleep(_VICTIMS_S)
                for child in children:
                    child.report()
                return 128 - failed[0] if failed[0] < 0 else failed[0]
            if all(code == 0 for code in codes):
                return Exit.DONE
            time.sleep(0.02)


class _Child:
    """A process of the comparison; of those after the first, the error stream goes to a file.

    A file and not a pipe: nobody reads while they run, and a full pipe would stop them.
    """

    def __init__(self, module: str, argv: Sequence[str], rank: int, size: int, address: str):
        self.rank = rank
        self._errors = tempfile.TemporaryFile("w+") if rank else None  # noqa: SIM115
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        names = {_RANK: str(rank), _SIZE: str(size), _ADDRESS: address, "JAX_PLATFORMS": "cpu"}
        if cores:
            names[_CORE] = str(cores[rank % len(cores)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            env=os.environ | names,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=self._errors,
        )

    def report(self) -> None:
        """Shows what the process wrote to its error stream, if it has ended in failure."""
        if self._errors is not None and self.process.poll():
            self._errors.seek(0)
            if text := self._errors.read():
                print(f"process {self.rank}:\n{text}", file=sys.stderr, end="")

    def end(self, deadline: float) -> None:
        """Waits until the process, which was asked to end, has ended; kills it at the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._errors is not None:
            self._errors.close()


@contextlib.contextmanager
def _ended_on_leaving() -> Iterator[list[_Child]]:
    """Yields a list; no process in it outlives the block, however the block ends."""
    children: list[_Child] = []
    try:
        yield children
    finally:
        for child in children:
            child.process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for child in children:
            child.end(deadline)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block like Ctrl-C: by default they would end us alone."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Has Linux kill this process when its parent is killed, which no handler can see."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it was, before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""Several processes on this machine, joined by JAX's own distributed runtime over loopback."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from jaxdp.errors import Exit, UserError

_RANK, _SIZE, _ADDRESS = "JAXDP_COMPARE_RANK", "JAXDP_COMPARE_SIZE", "JAXDP_COMPARE_ADDRESS"
_GRACE_S = 5.0


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


def join() -> None:
    """Joins the other processes; called in each before JAX starts."""
    import jax  # only the started processes need it

    # Gloo writes its greetings to standard output, where our table goes: give it the other stream
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
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
    """Runs `python -m module argv` as `nproc` processes, one core each where there are enough.

    Process 0 writes to this terminal.  When one fails, the others are ended and what it wrote to
    its error stream is shown.

    Returns:
      The exit code of the first that failed, or 0.
    """
    address = f"127.0.0.1:{_free_port()}"
    with _ended([_start(module, argv, r, nproc, address) for r in range(nproc)]) as children:
        while True:
            codes = [child.poll() for child in children]
            failed = [r for r, code in enumerate(codes) if code]
            if failed:
                return _report(failed[0], children[failed[0]])
            if all(code == 0 for code in codes):
                return Exit.DONE
            time.sleep(0.02)


def _start(
    module: str, argv: Sequence[str], rank: int, size: int, address: str
) -> subprocess.Popen[str]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

    def pin() -> None:
        # XLA sizes its thread pool by the cores it may use: two pools on all cores fight
        os.sched_setaffinity(0, {cores[rank % len(cores)]})

    return subprocess.Popen(
        [sys.executable, "-m", module, *argv],
        env=os.environ | {_RANK: str(rank), _SIZE: str(size), _ADDRESS: address},
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=None if rank == 0 else subprocess.PIPE,
        text=True,
        preexec_fn=pin if cores else None,
    )


def _report(rank: int, child: subprocess.Popen[str]) -> int:
    if child.stderr is not None:
        print(f"process {rank}:\n{child.stderr.read()}", file=sys.stderr, end="")
    code = child.returncode
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _ended(children: list[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Leaves no child behind, however the block ends."""
    try:
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

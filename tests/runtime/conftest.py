"""Real processes on this machine, joined over loopback, for what emulated devices cannot show."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxdp.runtime.children import free_port

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 240  # far more than anything takes: only a hang comes to it
AFTER_S = 20  # what is left is killed so long after the first failure


class Ended(NamedTuple):
    """How a process ended, and what it wrote."""

    code: int
    out: str
    err: str


class Processes:
    """`n` processes of one command, each in a session of its own; `n` = 1 has none to join.

    Attributes:
      running: the processes, by rank.
    """

    def __init__(self, argv, n, folder, environment):
        self.folder = folder
        ours = ("JAX_", "JAXDP_", "XLA_", "TF_")  # JAX has set some of them in this process
        plain = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        plain |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        address = f"127.0.0.1:{free_port()}"
        self.running = []
        for rank in range(n):
            place = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(n),
                "JAX_PROCESS_ID": str(rank),
            }
            with open(folder / f"out-{rank}", "w") as out, open(folder / f"err-{rank}", "w") as err:
                process = subprocess.Popen(
                    [sys.executable, *map(str, argv)],
                    env=plain | (place if n > 1 else {}) | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self.running.append(process)

    def signal(self, rank, number):
        self.running[rank].send_signal(number)

    def wait_until(self, condition):
        """Returns when the condition holds, or a process has ended."""
        deadline = time.monotonic() + LIMIT_S
        while not condition() and all(p.poll() is None for p in self.running):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait(self):
        """Waits for all; how each ended, by rank: killed by us (-9) if it outlived a failure."""
        deadline = time.monotonic() + LIMIT_S
        while (codes := [p.poll() for p in self.running]).count(None):
            if any(codes):
                deadline = min(deadline, time.monotonic() + AFTER_S)
            if time.monotonic() > deadline:
                self.end()
            time.sleep(0.02)
        texts = ((self.text("out", rank), self.text("err", rank)) for rank in range(len(codes)))
        return [Ended(code, *both) for code, both in zip(codes, texts, strict=True)]

    def text(self, stream, rank):
        """What a process has written so far, to "out" or "err"."""
        return (self.folder / f"{stream}-{rank}").read_text()

    def end(self):
        """Kills what is left, with all children."""
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def start_processes(tmp_path_factory, request):
    """(arguments of Python, n, **environment) -> `Processes`; none outlives the module's tests."""
    started = []

    def start(*argv, n=2, **environment):
        # the programs of these tests are compiled once for all of them
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(request.config.cache.mkdir("jax")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        folder = tmp_path_factory.mktemp("processes")
        started.append(Processes(argv, n, folder, cache | environment))
        return started[-1]

    yield start
    for processes in started:
        processes.end()


@pytest.fixture
def free_address():
    """An address of this machine on which nobody listens."""
    return f"127.0.0.1:{free_port()}"

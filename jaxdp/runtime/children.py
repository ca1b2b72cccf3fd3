"""The processes that a launcher starts: one for each rank of this host, each in its own session."""

import contextlib
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxdp.errors import UserError
from jaxdp.runtime import reaping
from jaxdp.runtime.control import CONTROL
from jaxdp.runtime.place import (
    ADDRESS,
    ATTEMPT,
    BIND,
    CORES,
    COUNT,
    ID,
    LOCAL_DEVICES,
    LOCAL_RANK,
)
from jaxdp.runtime.reaping import Job

_PLACE = (ADDRESS, COUNT, ID)
_TOLD = (*_PLACE, CONTROL, ATTEMPT, CORES, BIND, LOCAL_RANK)
_LISTENING = range(20_000, 32_000)  # below the ports that Linux gives to outgoing connections
_END_S = 5.0


class World(NamedTuple):
    """Where the processes of one attempt stand.

    Attributes:
      size: ranks on all hosts.
      first: the first of this host's.
      local: how many this host starts.
      address: HOST:PORT of the coordinator.
      bind: the address at which it listens; None is its own choice.
      control: the folder of heartbeats and errors.
      attempt: 0 at first, and one more after each restart.
      cores: of each local process; empty leaves them to the system.
      devices: accelerators of each local process; empty leaves them to JAX.
    """

    size: int
    first: int
    local: int
    address: str
    bind: str | None
    control: Path
    attempt: int
    cores: tuple[tuple[int, ...], ...] = ()
    devices: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        return range(self.first, self.first + self.local)


def check_count(nproc: int) -> None:
    """Raises UserError for a number of processes that this machine cannot hold."""
    most = max(16, 4 * (os.cpu_count() or 1))
    if not 1 <= nproc <= most:
        raise UserError(
            f"--nproc-per-node: {nproc} processes on {os.cpu_count()} cores; expected 1 to {most}"
        )


def environment(base: Mapping[str, str], world: World, rank: int, mark: str) -> dict[str, str]:
    """The environment of a rank; what an outer launcher set for its own ranks is left out."""
    local = rank - world.first
    given = {name: text for name, text in base.items() if name not in _TOLD}
    given |= {
        reaping.MARK: f"{base[reaping.MARK]}:{mark}" if reaping.MARK in base else mark,
        CONTROL: str(world.control),
        ATTEMPT: str(world.attempt),
        LOCAL_RANK: str(local),
        "PYTHONUNBUFFERED": "1",  # lines come when they are printed, also a killed process's last
    }
    given |= dict(zip(_PLACE, (world.address, str(world.size), str(rank)), strict=True))
    if world.bind:
        given[BIND] = world.bind
    if world.cores:
        given[CORES] = ",".join(map(str, world.cores[local]))
    if world.devices:
        given[LOCAL_DEVICES] = ",".join(map(str, world.devices[local]))
    return given


def cores() -> list[int]:
    """Those that this process may use; [] where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def shares(numbers: Sequence[int], processes: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring cores, or devices, for each process, as many for each; () if there are too few.

    >>> shares([0, 1, 4, 5, 6], 2)
    ((0, 1), (4, 5))
    """
    each = len(numbers) // processes
    if each == 0:
        return ()
    return tuple(tuple(numbers[each * i : each * (i + 1)]) for i in range(processes))


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine on which nobody listens."""
    for port in random.SystemRandom().sample(_LISTENING, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class Child:
    """A process that was started.  Until its crew reaps it, its number is its own.

    Attributes:
      rank: its number among all.
      code: how it ended: its exit code, or minus the signal's number; None while it lives.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes]):
        self.rank, self.process = rank, process
        self.code: int | None = None

    def poll(self) -> int | None:
        """Looks whether it has ended, without reaping it: its process group stays addressable."""
        if self.code is None:
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                exited = found.si_code == os.CLD_EXITED
                self.code = found.si_status if exited else -found.si_status
        return self.code

    def send(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for a signal; False where the system does not tell."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
            return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
        return False


class Crew:
    """The processes of one attempt, and what clears them up if this launcher is killed."""

    def __init__(self, mark: str, janitor: "Janitor"):
        self.children: list[Child] = []
        self._mark, self._janitor, self._reaped = mark, janitor, False

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        out: int | IO[Any] | None = subprocess.PIPE,
        err: int | IO[Any] | None = subprocess.PIPE,
    ) -> Child:
        """Starts a process in a session of its own, without input; outputs as `Popen` takes them.

        To be called from the main thread: the process ends when the thread that started it does.
        """
        tied = Path(__file__).with_name("tied.py")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(tied), str(os.getpid()), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        self._janitor.note("session", process.pid)
        child = Child(rank, process)
        self.children.append(child)
        return child

    def kill(self) -> list[int]:
        """Kills all processes and what they started; returns those that cannot be killed."""
        sessions = frozenset(child.process.pid for child in self.children)
        return reaping.end_job(Job(self._mark, sessions))

    def end(self) -> list[int]:
        """Kills what is left, and reaps; returns the processes that cannot be killed."""
        if self._reaped:  # their numbers may be other processes' by now
            return []
        left, self._reaped = self.kill(), True
        deadline = time.monotonic() + _END_S
        for child in self.children:
            # its code first: reaping forgets it
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            self._janitor.note("reaped", child.process.pid)
            if child.code is not None:
                child.process.wait()
        return left


class Janitor:
    """A small process that ends the job's processes if this one is killed and cannot do it."""

    def __init__(self, mark: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaping.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self.note("mark", mark)

    def note(self, kind: str, value: object) -> None:
        """Tells it what to clear up, or no more; the words are those of `reaping.watch_over`."""
        with contextlib.suppress(BrokenPipeError):  # it was killed: then only we clear up
            assert self._process.stdin is not None
            self._process.stdin.write(f"{kind} {value}\n".encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Everything has been cleared up."""
        self.note("done", "")
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def hired_janitor() -> Iterator[tuple[str, Janitor]]:
    """Yields a new job's mark, and a janitor who knows it; the block clears up itself."""
    mark = secrets.token_hex(8)
    janitor = Janitor(mark)
    try:
        yield mark, janitor
    finally:
        janitor.dismiss()


@contextlib.contextmanager
def crew(mark: str, janitor: Janitor) -> Iterator[Crew]:
    """Yields a crew; none of its processes outlives the block, however the block ends."""
    found = Crew(mark, janitor)
    try:
        yield found
    finally:
        found.end()

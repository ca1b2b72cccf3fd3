"""One attempt: all ranks of this host are started, watched, and gone when it returns."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdp.errors import Exit
from jaxdp.runtime.children import Crew, Janitor, World, crew, environment
from jaxdp.runtime.control import Heartbeat, read_failure, stacks_file
from jaxdp.runtime.failing import (
    Death,
    Told,
    asked_to_end,
    first_failure,
    is_failure,
    not_started,
    outcome,
    tell,
)
from jaxdp.runtime.output import Output, RankOutput
from jaxdp.runtime.reaping import state
from jaxdp.runtime.requests import Requests
from jaxdp.runtime.watching import Stuck, Watcher, describe, read_beats, stacks

_TICK_S = 0.02
_LOOK_S = 0.2  # between two readings of the heartbeats
_PEERS_S = 0.4  # for ranks that lost a peer, to say so
_STACKS_S = 0.7  # for stacks to be written
_SPARE = 8  # open files


class Job(NamedTuple):
    """What is started, and how it is watched.

    Attributes:
      command: of every rank.
      beats: whether it is known to write heartbeats.
      deadlines: seconds without a heartbeat, by phase.
      grace_s: from the request to end until SIGKILL.
      mark: by which its processes are known.
      log_files: whether each rank's lines go to a file in the control folder.
    """

    command: Sequence[str]
    beats: bool
    deadlines: Mapping[str, float]
    grace_s: float
    mark: str
    log_files: bool = False


class Ending(NamedTuple):
    """How an attempt ended.

    Attributes:
      code: of law 9.
      told: the first failure, or who was stuck.
      farthest: the farthest step of any rank; 0 if none is known.
      beats: whether the program writes heartbeats.
    """

    code: int
    told: Told | None
    farthest: int
    beats: bool


def run_attempt(
    job: Job, world: World, output: Output, requests: Requests, janitor: Janitor
) -> Ending:
    """Starts the ranks and returns when the last of them, and all that they started, has gone."""
    output.release()
    with crew(job.mark, janitor) as started:
        run = _Run(job, world, output, requests, started)
        run.start()
        while not run.over():
            time.sleep(_TICK_S)
        if left := started.end():
            output.say(f"launch: processes {left} cannot be killed: they wait inside the kernel")
        return run.ending()


class _Run:
    """What is known of a running attempt."""

    def __init__(self, job: Job, world: World, output: Output, requests: Requests, started: Crew):
        self._job, self._world, self._output = job, world, output
        self._requests, self._crew = requests, started
        self._printed: dict[int, RankOutput] = {}
        self._deaths: dict[int, Death] = {}
        self._killed: set[int] = set()
        self._kill_at = math.inf
        self._told: Told | None = None
        self._asked = self._failing = False
        self._look_at = time.monotonic()
        self._watcher = Watcher(world.ranks, job.deadlines, job.beats, self._look_at)

    def start(self) -> None:
        """Starts every rank of this host, unless the job is asked to end meanwhile."""
        for rank in self._world.ranks:
            if self._requests.number is not None:
                return
            try:
                with _spare_descriptors():  # clearing up needs some
                    self._start(rank)
            except (OSError, RuntimeError) as error:  # no more processes, threads, files, no memory
                self._told = not_started(rank, error)
                self._kill_at = 0.0
                return

    def _start(self, rank: int) -> None:
        given = environment(os.environ, self._world, rank, self._job.mark)
        child = self._crew.start(rank, self._job.command, given)
        path = self._world.control / f"rank-{rank}.log" if self._job.log_files else None
        self._printed[rank] = RankOutput(self._output, rank, child.process, path)

    def over(self) -> bool:
        """Looks at everything once; True when every rank has ended, or was killed."""
        now = time.monotonic()
        self._see_deaths(now)
        self._see_requests(now)
        if now >= self._look_at:
            self._look(now)
            self._look_at = now + _LOOK_S
        alive = self._alive()
        if alive and (now > self._kill_at or self._requests.at_once):
            self._killed.update(alive)
            self._crew.kill()
            return True
        return not alive

    def ending(self) -> Ending:
        """How it ended; to be asked when everything is gone."""
        now = time.monotonic()
        self._see_deaths(now)
        self._watcher.look(self._read_beats(), (), now)
        for printed in self._printed.values():
            printed.finish()
        deaths = list(self._deaths.values())
        told = self._told or self._first_told(deaths)
        code = outcome(deaths, told, self._requests.number, self._world.local)
        if told is not None and told.code != code:  # of a job that was asked to end
            told = None
        return Ending(code, told, self._watcher.farthest, self._watcher.beats)

    def _first_told(self, deaths: Sequence[Death]) -> Told | None:
        read = {death.rank: read_failure(self._world.control, death.rank) for death in deaths}
        written = {rank: failure for rank, failure in read.items() if failure is not None}
        first = first_failure(deaths, written)
        if first is None:
            return None
        tail = self._printed[first.rank].tail()
        return tell(first, written.get(first.rank), tail, self._watcher.place(first.rank))

    def _alive(self) -> list[int]:
        return [child.rank for child in self._crew.children if child.poll() is None]

    def _read_beats(self) -> dict[int, Heartbeat | None]:
        return read_beats(self._world.control, self._world.ranks)

    def _kill_within(self, seconds: float, now: float) -> None:
        self._kill_at = min(self._kill_at, now + seconds)

    def _see_deaths(self, now: float) -> None:
        for child in self._crew.children:
            code = child.poll()
            if code is None or child.rank in self._deaths:
                continue
            death = Death(child.rank, code, time.time(), child.rank in self._killed)
            self._deaths[child.rank] = death
            number = asked_to_end(code)
            if is_failure(death):
                if not self._failing:
                    self._output.hold()
                self._failing = True
                self._kill_within(_PEERS_S, now)
            elif number is not None and not death.ours:  # to one rank is to the job
                self._requests.note(
                    number, f"{signal.Signals(number).name} ended rank {child.rank}"
                )
            elif code == Exit.SAVED:
                self._kill_within(self._job.grace_s, now)

    def _see_requests(self, now: float) -> None:
        if self._output.reader_left:
            self._requests.note(signal.SIGPIPE, "nobody reads the output any more")
        if self._requests.number is None or self._asked:
            return
        self._asked = True
        if self._alive():
            self._output.say(
                f"launch: {self._requests.reason}: all ranks are asked to save and end within "
                f"{self._job.grace_s:g} s"
            )
        self._kill_within(self._job.grace_s, now)
        for child in self._crew.children:
            child.send(signal.SIGTERM)

    def _look(self, now: float) -> None:
        self._watcher.look(self._read_beats(), self._alive(), now)
        if self._kill_at < math.inf:  # it ends anyway
            return
        stuck = self._watcher.stuck(now, self._is_stopped)
        if stuck is not None:
            self._end_stuck(stuck)

    def _is_stopped(self, rank: int) -> bool:
        return any(c.rank == rank and state(c.process.pid) == "T" for c in self._crew.children)

    def _end_stuck(self, stuck: Stuck) -> None:
        """Has all ranks write their stacks, then ends them."""
        self._output.hold()
        stopped = self._is_stopped(stuck.rank)
        self._dump_stacks()
        control = self._world.control
        details = "\n".join(stacks(control, self._world.ranks, stuck.rank))
        line = describe(stuck, stopped)
        if self._world.size > self._world.local:
            line += "; or it waits for a rank of another host"
        self._told = Told(stuck.rank, Exit.PEER, line, details, stuck.phase, stuck.step)
        self._kill_at = 0.0

    def _dump_stacks(self) -> None:
        asked = [child for child in self._crew.children if child.catches(signal.SIGUSR1)]
        for child in asked:  # others would die of it
            child.send(signal.SIGUSR1)
        files = [
            stacks_file(self._world.control, child.rank)
            for child in asked
            if not self._is_stopped(child.rank)
        ]
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline and not all(map(_is_written, files)):
            time.sleep(_TICK_S)
        time.sleep(_TICK_S)


@contextlib.contextmanager
def _spare_descriptors() -> Iterator[None]:
    """Keeps open files in reserve inside the block: one that takes the last leaves these behind."""
    with contextlib.ExitStack() as stack:
        for _ in range(_SPARE):
            stack.enter_context(open(os.devnull))
        yield


def _is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0

"""Whether the ranks still move, judged by their heartbeats; who is stuck, and where.

Only what changes counts: the launcher notes by its own clock when it saw a rank's record change.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxdp.runtime.control import Heartbeat, read_heartbeat, stacks_file
from jaxdp.runtime.phases import PHASES, START

_STALL_S = 2.0  # between two looks: more, and this launcher itself did not run
_FRAMES = 8


@dataclass
class Seen:
    """What is known of a rank: its newest record, and since when there has been no newer one."""

    beat: Heartbeat | None
    since: float

    @property
    def phase(self) -> str:
        """Where it is; before its first record it starts."""
        return self.beat.phase if self.beat else START

    @property
    def step(self) -> int | None:
        """The step of its newest record."""
        return self.beat.step if self.beat else None

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is: by step, then by phase in the order of the loop."""
        return (-1 if self.step is None else self.step, PHASES.index(self.phase))


class Stuck(NamedTuple):
    """A rank that has not moved for longer than its phase may take."""

    rank: int
    phase: str
    step: int | None
    silent_s: float
    deadline_s: float


class Watcher:
    """Holds the ranks' silence against the deadline of the phase that each is in.

    Args:
      ranks: those to watch.
      deadlines: seconds without a new heartbeat, by phase.
      beats: whether the program is known to write heartbeats.  One that does not is never stuck;
        it counts as one that does as soon as any of its ranks wrote one.
      now: `time.monotonic()`.
    """

    def __init__(
        self, ranks: Sequence[int], deadlines: Mapping[str, float], beats: bool, now: float
    ):
        self.beats = beats
        self._seen = {rank: Seen(None, now) for rank in ranks}
        self._alive: Collection[int] = ranks
        self._deadlines, self._looked = deadlines, now

    def look(
        self, beats: Mapping[int, Heartbeat | None], alive: Collection[int], now: float
    ) -> None:
        """Notes the records that are there now; only ranks that are alive can be stuck."""
        pause = now - self._looked
        self._looked, self._alive = now, alive
        for rank, beat in beats.items():
            if beat is not None and beat != self._seen[rank].beat:
                self._seen[rank] = Seen(beat, now)
                self.beats = True
            elif pause > _STALL_S:  # a stopped launcher, a frozen machine: nobody could move
                self._seen[rank].since += pause

    def place(self, rank: int) -> tuple[str | None, int | None]:
        """Phase and step of a rank's newest record."""
        seen = self._seen[rank]
        return (seen.phase, seen.step) if seen.beat else (None, None)

    @property
    def farthest(self) -> int:
        """The farthest step of any rank; 0 if none is known."""
        return max((seen.step or 0 for seen in self._seen.values()), default=0)

    def stuck(
        self, now: float, stopped: Callable[[int], bool] = lambda rank: False
    ) -> Stuck | None:
        """The rank that holds the others up, once it has been silent for too long.

        A rank over its deadline may wait for one that is farther behind, and is within its own: a
        long save of rank 0 is no fault of the others'.

        Args:
          now: `time.monotonic()`.
          stopped: whether a rank was stopped by a signal, which tells more than who is behind.
        """
        if not self.beats or not self._alive:
            return None
        last = min(self._alive, key=lambda r: (self._seen[r].progress, self._seen[r].since))
        if now - self._seen[last].since <= self._deadlines[self._seen[last].phase]:
            return None
        rank = next(filter(stopped, self._alive), last)
        seen = self._seen[rank]
        return Stuck(rank, seen.phase, seen.step, now - seen.since, self._deadlines[seen.phase])


def read_beats(folder: Path, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
    """The newest records of ranks."""
    return {rank: read_heartbeat(folder, rank) for rank in ranks}


def describe(stuck: Stuck, stopped: bool) -> str:
    """One line: which rank is stuck, in which phase at which step, and for how long."""
    step = f" at step {stuck.step}" if stuck.step is not None else ""
    how = "; it was stopped by a signal (SIGSTOP)" if stopped else ""
    return (
        f"rank {stuck.rank} is stuck in phase {stuck.phase}{step}: no heartbeat for "
        f"{stuck.silent_s:.1f} s, allowed are {stuck.deadline_s:g} s{how}"
    )


def main_thread(dump: str, frames: int = _FRAMES) -> list[str]:
    """The last frames of the main thread, in faulthandler's words, from its newest dump.

    >>> main_thread('Thread 0x2 (most recent call first):\\n  File "a.py", line 1 in wait\\n\\n'
    ...             'Current thread 0x1 (most recent call first):\\n  File "b.py", line 2 in f\\n')
    ['File "b.py", line 2 in f']
    """
    # faulthandler tells the main thread last
    threads = re.split(r"^(?:Current thread|Thread) 0x.*$", dump, flags=re.MULTILINE)
    lines = [line.strip() for line in threads[-1].splitlines() if line.strip()]
    return [line for line in lines if line.startswith("File ")][:frames] if threads[1:] else []


def stacks(folder: Path, ranks: Sequence[int], first: int) -> list[str]:
    """The main threads of the ranks that dumped their stacks, that of rank `first` at the top."""
    lines = []
    for rank in sorted(ranks, key=lambda rank: rank != first):
        try:
            found = main_thread(stacks_file(folder, rank).read_text(errors="replace"))
        except OSError:
            continue
        if found:
            lines.append(f"rank {rank}, main thread, most recent call first:")
            lines += [f"  {line}" for line in found]
    return lines

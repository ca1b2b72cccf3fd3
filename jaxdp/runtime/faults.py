"""Fault points: a run that is told to fail at a known place, for tests of what comes after.

    JAXDP_FAULTS="rank:step:phase:action,..."     JAXDP_FAULTS="1:4:step:kill,*:*:save:slow:2.5"

`*` is any rank, any step.  The phases are those of `phases.py`, and `input`, in the thread that
makes batches.  A fault happens where its phase is entered, once for each run folder: a file in
`.faults/` there remembers it, so that the run which goes on passes the same place unharmed.  Only
`slow` happens each time.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdp.errors import UserError
from jaxdp.runtime.phases import INPUT, PHASES

FAULTS = "JAXDP_FAULTS"  # environment variable


class PlannedError(Exception):
    """Raised by the action `raise`; nobody expects it, as nobody expects a bug."""


@dataclass(frozen=True)
class Fault:
    """Something to go wrong.

    Attributes:
      rank, step: where; None: any, and then whichever comes first.
      phase: where, too.
      action: what; one of `ACTIONS`.
      seconds: how long, for the action `slow`.
    """

    rank: int | None
    step: int | None
    phase: str
    action: str
    seconds: float = 0.0

    def matches(self, rank: int, step: int, phase: str) -> bool:
        return phase == self.phase and self.rank in (None, rank) and self.step in (None, step)


def _raise(fault: Fault) -> None:
    raise PlannedError(f"a fault that {FAULTS} asked for, in phase {fault.phase}")


def _hang(fault: Fault) -> None:
    while True:
        time.sleep(3600)


def _send(number: signal.Signals) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


ACTIONS: dict[str, Callable[[Fault], None]] = {
    "kill": _send(signal.SIGKILL),
    "term": _send(signal.SIGTERM),
    "int": _send(signal.SIGINT),
    "stop": _send(signal.SIGSTOP),
    "raise": _raise,
    "exit": lambda fault: os._exit(1),
    "hang": _hang,
    "slow": lambda fault: time.sleep(fault.seconds),
}


def parse_faults(text: str) -> list[Fault]:
    """The faults that a value of JAXDP_FAULTS asks for.

    Raises:
      UserError: it is not of the form that this module's docstring shows; a line per mistake.
    """
    faults, mistakes = [], []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        try:
            faults.append(_parse(entry))
        except ValueError as error:
            mistakes.append(f"{FAULTS}: {entry!r}: {error}")
    if mistakes:
        raise UserError(*mistakes)
    return faults


def _parse(entry: str) -> Fault:
    rank, step, phase, action, *more = entry.split(":") + [""] * (3 - entry.count(":"))
    if phase not in (*PHASES, INPUT):
        raise ValueError(f"no phase {phase!r}; expected {', '.join((*PHASES, INPUT))}")
    if action not in ACTIONS:
        raise ValueError(f"no action {action!r}; expected {', '.join(ACTIONS)}")
    if len(more) != (action == "slow"):
        raise ValueError("expected rank:step:phase:action, and slow:SECONDS as the action slow")
    return Fault(_number(rank, "rank"), _number(step, "step"), phase, action, _seconds(more))


def _number(word: str, what: str) -> int | None:
    if word == "*":
        return None
    if not (word.isascii() and word.isdigit()):
        raise ValueError(f"{what} {word!r}; expected a whole number, or * for any")
    return int(word)


def _seconds(words: list[str]) -> float:
    if not words:
        return 0.0
    try:
        seconds = float(words[0])
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{words[0]!r} seconds; expected a number, 0 or more")
    return seconds


class FaultPoints:
    """The faults of one rank of a run."""

    def __init__(self, faults: Sequence[Fault], rank: int, out: Path):
        """Takes those that may concern `rank`; `out` is the run folder."""
        self._rank, self._folder = rank, out / ".faults"
        self._faults = [(i, fault) for i, fault in enumerate(faults) if fault.rank in (None, rank)]

    def reach(self, phase: str, step: int) -> None:
        """Does what is planned for here, if anything is."""
        for i, fault in self._faults:
            if fault.matches(self._rank, step, phase) and self._is_first_time(i, fault):
                ACTIONS[fault.action](fault)

    def _is_first_time(self, i: int, fault: Fault) -> bool:
        if fault.action == "slow":
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        try:  # by the file system, since ranks that any rank's fault concerns may come together
            (self._folder / f"{i}-{fault.phase}-{fault.action}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

"""Whether a failed job is started again, when, and with how many processes: pure decisions."""

from typing import NamedTuple

from jaxdp.errors import Exit
from jaxdp.runtime.phases import START

FINAL = (Exit.DONE, Exit.USER, Exit.FAULT_FOUND, Exit.NUMERICS, Exit.STORAGE, Exit.SAVED)
SAME_STEP = 3  # failures at one step, one after the other, before the job is given up
_LONGEST_DELAY_S = 32.0


class Rules(NamedTuple):
    """What the user allows.

    Attributes:
      max_restarts: restarts without progress in between.
      nproc: processes of this host.
      min_nproc: as few as this many, if so many do not get going; None is never fewer.
    """

    max_restarts: int
    nproc: int
    min_nproc: int | None = None


class History(NamedTuple):
    """What came of the attempts so far.

    Attributes:
      used: restarts since there was progress.
      farthest: the farthest step that any rank was at.
      place, times: phase and step of the last failure, and how often it was there in a row.
      nproc: processes of the attempt that comes.
    """

    nproc: int
    used: int = 0
    farthest: int = 0
    place: tuple[str | None, int | None] = (None, None)
    times: int = 0


class End(NamedTuple):
    """What an attempt ended with: its code, where it failed, and the farthest step of its ranks."""

    code: int
    phase: str | None = None
    step: int | None = None
    farthest: int = 0


class Decision(NamedTuple):
    """What to do: `delay_s` until the next attempt, None to end; and why, for people."""

    history: History
    delay_s: float | None
    why: str = ""


def decide(rules: Rules, history: History, end: End) -> Decision:
    """What to do after an attempt has failed.

    - Codes that another attempt cannot change end the job.
    - A step at which the job failed three times in a row ends it.
    - Otherwise the job restarts while there are restarts left; a step farther than any before
      gives all of them back.  The first restart is immediate, then 1, 2, 4, .. 32 s pass.
    - With `min_nproc`, a restart that came to no new step is followed by one with a process fewer;
      a count that the program refuses (code 2) is passed over, and costs no restart.
    """
    if end.code == Exit.USER and history.nproc < rules.nproc:
        return _fewer(rules, history, end)
    if end.code in FINAL:
        return Decision(history, None)
    progress = end.farthest > history.farthest
    place = (end.phase, end.step)
    times = history.times + 1 if place == history.place else 1
    used = 0 if progress else history.used
    now = history._replace(
        used=used + 1, farthest=max(end.farthest, history.farthest), place=place, times=times
    )
    if times >= SAME_STEP and end.step is not None and end.phase != START:
        return Decision(now, None, f"it failed {times} times in a row at step {end.step}")
    if used >= rules.max_restarts:
        return Decision(now, None, _spent(rules))
    if rules.min_nproc is not None and used and history.nproc > rules.min_nproc:
        now = now._replace(nproc=history.nproc - 1)
    delay_s = min(2.0 ** (used - 1), _LONGEST_DELAY_S) if used else 0.0
    return Decision(now, delay_s, f"{rules.max_restarts - now.used} of {rules.max_restarts} left")


def _fewer(rules: Rules, history: History, end: End) -> Decision:
    """After a count that the program refuses: the next smaller one, at once."""
    if rules.min_nproc is None or history.nproc <= rules.min_nproc:
        return Decision(history, None, f"no number of processes from {rules.min_nproc} on is left")
    left = rules.max_restarts - history.used
    return Decision(
        history._replace(nproc=history.nproc - 1), 0.0, f"{left} of {rules.max_restarts} left"
    )


def _spent(rules: Rules) -> str:
    if rules.max_restarts == 0:
        return "--max-restarts is 0"
    return f"all {rules.max_restarts} restarts were used without progress"

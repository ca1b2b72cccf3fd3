"""Who keeps the others waiting: what each process spends by itself, before the collective.

Inside a step all processes take equally long, since they wait for each other in the collective.  So
each one measures what it does alone, waiting for its input and running the loop's Python, and these
are compared now and then, over the coordination service: no device and no step waits for it.  What
a device by itself takes longer for is not seen here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdp import peers

_FACTOR = 2.0  # of what the others take
_LEAST_S = 0.005  # more than they take
_LEAST_SHARE = 0.1  # of a step, more than they take
_TIMES = 3  # in a row: one may be a pause of the machine


class Own(NamedTuple):
    """Seconds that a process takes for a step, on average.

    Attributes:
      step_s: the whole step, waiting for the others included.
      input_s: waiting for its input.
      host_s: in the loop's own code on the host, whose log and hooks are part of it.
    """

    step_s: float
    input_s: float
    host_s: float


_WHERE = {"input_s": "waiting for its input", "host_s": "in its code on the host"}


@dataclass(frozen=True)
class Straggler:
    """A process that the others wait for.

    Attributes:
      rank: which.
      phase: a field of `Own`: where it is slow.
      seconds, others_s: what it takes there for a step, and the median of the others.
      step_s: what a step takes.
    """

    rank: int
    phase: str
    seconds: float
    others_s: float
    step_s: float

    def describe(self, ranks: int) -> str:
        """One line."""
        others = "the other" if ranks == 2 else "the others (median)"
        return (
            f"straggler: rank {self.rank} of {ranks} spends {1e3 * self.seconds:.0f} ms a step "
            f"{_WHERE[self.phase]}, {others} {1e3 * self.others_s:.0f} ms; a step takes "
            f"{1e3 * self.step_s:.0f} ms"
        )


def find_straggler(own: Sequence[Own]) -> Straggler | None:
    """The process that the others wait for most, if one is much slower than they are.

    Much is: twice the median of the others, and 5 ms and a tenth of a step more than that.

    Args:
      own: of each rank, in their order.
    """
    if len(own) < 2:
        return None
    found: list[Straggler] = []
    for phase in Own._fields[1:]:
        column = np.array([getattr(one, phase) for one in own])
        rank = int(np.argmax(column))
        seconds, others_s = float(column[rank]), float(np.median(np.delete(column, rank)))
        step_s = own[rank].step_s
        least = max(_LEAST_S, _LEAST_SHARE * step_s)
        if seconds >= _FACTOR * others_s and seconds - others_s >= least:
            found.append(Straggler(rank, phase, seconds, others_s, step_s))
    return max(found, key=lambda one: one.seconds - one.others_s, default=None)


class Stragglers:
    """Tells of a process that is slower than the others several times in a row, once."""

    def __init__(
        self,
        tell: Callable[[str], None],
        exchange: Callable[[Own], Sequence[Own] | None] | None = None,
    ):
        """Takes where lines go; `exchange` tells one's own seconds and returns everybody's."""
        self._tell, self._exchange = tell, exchange or exchange_over_service
        self._last: tuple[int, str] | None = None
        self._times = 0

    def compare(self, step: int, own: Own) -> None:
        """Takes this process's seconds since the last time; every process calls this as often."""
        everybody = self._exchange(own)
        if everybody is None:
            return
        found = find_straggler(everybody)
        who = found and (found.rank, found.phase)
        self._times = self._times + 1 if who == self._last else 1
        self._last = who
        if found and self._times == _TIMES:
            self._tell(f"step {step}  {found.describe(len(everybody))}")


def exchange_over_service(own: Own) -> list[Own] | None:
    """What each rank spent when it said so last; as `peers.left_by_all`."""
    left = peers.left_by_all("own", own)
    return left and [Own(*values) for values in left]

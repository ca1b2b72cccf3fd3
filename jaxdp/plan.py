"""What a compiled step is to communicate, by name: stated before compiling, held against it after.

Every part that communicates (buckets of gradients, a guard, a gather of parameters) states its
collectives as a `Plan`; plans add up.  `describe` says whether the compiled program does the same.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from jaxdp.hlo import Collective, describe, format_bytes
from jaxdp.wording import counted


class Planned(NamedTuple):
    """The collectives of one kind that one named thing needs.

    Attributes:
      name: what they carry, for people: "bucket 0", "exact bucket".  A thing that needs two
        kinds (all-to-all, then all-gather) has two entries of one name.
      kind: as `hlo.KINDS` calls it.
      count: instructions in the compiled program.
      result_bytes: what they return on one device, together: what `hlo.collectives` finds.
      sent_bytes: what the busiest rank sends.  The compiler's own all-reduce is priced as the
        least that any all-reduce sends, 2 (n - 1) / n of its data.
      in_loop: whether they stand in a loop, and so run several times a step.
    """

    name: str
    kind: str
    count: int
    result_bytes: int
    sent_bytes: int
    in_loop: bool = False


@dataclass(frozen=True)
class Plan:
    """All collectives of a program; `a + b` is the plan of a program that does both."""

    collectives: tuple[Planned, ...] = ()

    def __add__(self, other: "Plan") -> "Plan":
        return Plan(self.collectives + other.collectives)

    @property
    def names(self) -> tuple[str, ...]:
        """What is communicated, each name once, in order."""
        return tuple(dict.fromkeys(one.name for one in self.collectives))

    @property
    def sent_bytes(self) -> int:
        """What the busiest rank sends in all, loops counted once."""
        return sum(one.sent_bytes for one in self.collectives)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Kind -> (instructions, result bytes), sorted by kind."""
        return _totals((one.kind, one.count, one.result_bytes) for one in self.collectives)


def found_totals(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """`Plan.totals` of what `hlo.collectives` found."""
    return _totals((one.kind, 1, one.result_bytes) for one in found)


def as_planned(plan: Plan, found: list[Collective]) -> bool:
    """Whether a program holds the planned collectives, all of them and nothing else.

    One in a loop may run several times a step: none is there that was not planned there.
    """
    return found_totals(found) == plan.totals() and not looped(plan, found)


def looped(plan: Plan, found: list[Collective]) -> int:
    """How many collectives more than planned stand in a loop."""
    planned = sum(one.count for one in plan.collectives if one.in_loop)
    return max(0, sum(one.in_loop for one in found) - planned)


def compare(plan: Plan, found: list[Collective]) -> str:
    """Planned against found, in words."""
    if as_planned(plan, found):
        return f"{_names(plan)} planned, {describe(found)} found in the compiled step"
    planned = "; ".join(
        f"{counted(count, kind)}, {format_bytes(nbytes)}"
        for kind, (count, nbytes) in plan.totals().items()
    )
    text = f"{_names(plan)} planned as {planned or 'no collective'}; the compiled step runs "
    text += describe(found)
    if more := looped(plan, found):
        text += f", {more} of them in a loop"
    return text + _why(plan, found)


def _why(plan: Plan, found: list[Collective]) -> str:
    """What the compiler did, where the counts tell it."""
    planned, there = plan.totals(), found_totals(found)
    if planned.keys() == there.keys():
        counts = {kind: (planned[kind][0], there[kind][0]) for kind in planned}
        if all(a == b for a, b in counts.values()):
            # XLA:CPU adds 16-bit floats as float32, and merges nothing when told not to
            return ": the compiler carries wider types than were asked for"
        if all(a >= b for a, b in counts.values()):
            return ": the compiler merged them"
        if all(a <= b for a, b in counts.values()):
            return ": the compiler split them"
    return ""


def _names(plan: Plan) -> str:
    """`5 buckets`, or what else there is."""
    kinds = Counter(name.rstrip("0123456789 ") for name in plan.names)
    return ", ".join(counted(count, kind) for kind, count in kinds.items()) or "nothing"


def _totals(entries) -> dict[str, tuple[int, int]]:
    counts, sizes = Counter(), Counter()
    for kind, count, nbytes in entries:
        counts[kind] += count
        sizes[kind] += nbytes
    return {kind: (counts[kind], sizes[kind]) for kind in sorted(counts)}

"""Proof that a schedule is right, by running it on symbols.

Every value is an expression over the ranks' contributions.  Two things are read off at the end:
each contribution is there exactly once, and whether all ranks hold *the same* value.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from jaxdp.collectives.schedule import Schedule, Transfer

# copied: every rank holds copies of a value that was computed once, equal to the bit by
#   construction.
# redundant: ranks computed the value separately, in the same order; equal on paper, but a compiler
#   may contract a multiply into an add on some of them, so execution must fence the operands.
# owned: nobody shares a result (reduce-scatter).
Agreement = Literal["copied", "redundant", "owned"]


_DIGIT = 32  # more than any schedule could double a contribution to, and still be caught


class ScheduleError(Exception):
    """A schedule loses, doubles or misplaces a contribution, or its ranks disagree."""


@dataclass(frozen=True)
class _Value:
    """An expression: `tree` says what is added in which order, `made` where it was computed."""

    counts: int  # how often each rank's contribution is in it, _DIGIT bits per rank
    tree: int  # equal numbers: the same operations in the same order
    made: int  # equal numbers: the very same computed value

    def count(self, rank: int) -> int:
        return self.counts >> _DIGIT * rank & (1 << _DIGIT) - 1


class _Factory:
    """Makes values and numbers expressions, so that comparing trees is comparing numbers."""

    def __init__(self):
        self.trees: dict[tuple, int] = {}
        self.made = 0

    def leaf(self, rank: int) -> _Value:
        return self._new(1 << _DIGIT * rank, ("leaf", rank))

    def combine(self, held: _Value, arrived: _Value) -> _Value:
        # a + b and b + a are the same number in floating point
        return self._new(held.counts + arrived.counts, ("add", *sorted((held.tree, arrived.tree))))

    def _new(self, counts: int, expression: tuple) -> _Value:
        self.made += 1
        return _Value(counts, self.trees.setdefault(expression, len(self.trees)), self.made)


@lru_cache(maxsize=256)
def verify(schedule: Schedule) -> Agreement:
    """Proves that `schedule` does what its `result` says.

    Returns:
      How the ranks' results agree: "copied", "redundant", or "owned" for a reduce-scatter.

    Raises:
      ScheduleError: naming the first rank and chunk that are wrong, and how.
    """
    _check_form(schedule)
    factory = _Factory()
    held = _run(schedule, factory)
    _check_contributions(schedule, held)
    return _agreement(schedule, held)


def _run(schedule: Schedule, factory: _Factory) -> list[list[_Value | None]]:
    n, chunks = schedule.n, schedule.chunks
    held: list[list[_Value | None]] = [
        [factory.leaf(r) if c in schedule.starts_with(r) else None for c in range(chunks)]
        for r in range(n)
    ]
    for number, transfers in enumerate(schedule.rounds):
        before = [list(row) for row in held]
        written: Counter[tuple[int, int]] = Counter()
        for transfer in transfers:
            for (source, destination), sent in zip(transfer.pairs, transfer.chunks, strict=True):
                for chunk in sent:
                    where = f"round {number}: rank {source} sends chunk {chunk} to {destination}"
                    arrived, own = before[source][chunk], before[destination][chunk]
                    if arrived is None:
                        raise ScheduleError(f"{where}, which it does not hold")
                    if transfer.reduce and own is None:
                        raise ScheduleError(f"{where}, which has nothing to add it to")
                    written[destination, chunk] += 1
                    if written[destination, chunk] > 1:
                        raise ScheduleError(f"{where}, which is written twice in this round")
                    held[destination][chunk] = (
                        factory.combine(own, arrived) if transfer.reduce and own else arrived
                    )
    return held


def _check_form(schedule: Schedule) -> None:
    if schedule.result in ("reduce_scatter", "all_gather") and schedule.chunks % schedule.n:
        raise ScheduleError(f"{schedule.chunks} chunks cannot be owned by {schedule.n} ranks")
    if not 0 <= schedule.root < schedule.n:
        raise ScheduleError(f"root {schedule.root}: a rank outside 0..{schedule.n - 1}")
    for rank, slots in enumerate(schedule.slot):
        if sorted(slots) != list(range(schedule.chunks)):
            raise ScheduleError(f"rank {rank}: its slots are not a permutation of the chunks")
    for number, transfers in enumerate(schedule.rounds):
        for transfer in transfers:
            _check_transfer(schedule, f"round {number}", transfer)


def _check_transfer(schedule: Schedule, where: str, transfer: Transfer) -> None:
    sources = [source for source, _ in transfer.pairs]
    destinations = [destination for _, destination in transfer.pairs]
    if len(set(sources)) < len(sources) or len(set(destinations)) < len(destinations):
        raise ScheduleError(f"{where}: a rank is twice a source or twice a destination")
    if not set(sources + destinations) <= set(range(schedule.n)):
        raise ScheduleError(f"{where}: a rank outside 0..{schedule.n - 1}")
    if len({len(sent) for sent in transfer.chunks}) > 1:
        raise ScheduleError(f"{where}: pairs of one transfer carry different numbers of chunks")
    if not {c for sent in transfer.chunks for c in sent} <= set(range(schedule.chunks)):
        raise ScheduleError(f"{where}: a chunk outside 0..{schedule.chunks - 1}")


def _check_contributions(schedule: Schedule, held: list[list[_Value | None]]) -> None:
    for rank in range(schedule.n):
        for chunk in schedule.ends_with(rank):
            value = held[rank][chunk]
            if value is None:
                raise ScheduleError(f"rank {rank} never receives chunk {chunk}")
            wanted = schedule.contributors(chunk)
            if value.counts == _once(wanted):
                continue
            for contributor in range(schedule.n):
                count, expected = value.count(contributor), int(contributor in wanted)
                if count != expected:
                    raise ScheduleError(
                        f"rank {rank}, chunk {chunk}: the contribution of rank {contributor} is "
                        f"counted {count} times instead of {expected}"
                    )


@lru_cache(maxsize=1024)
def _once(ranks: range) -> int:
    """The counts of a value that holds the contributions of `ranks` once each."""
    return sum(1 << _DIGIT * rank for rank in ranks)


def _agreement(schedule: Schedule, held: list[list[_Value | None]]) -> Agreement:
    if schedule.result == "reduce_scatter":
        return "owned"
    agreement: Agreement = "copied"
    for chunk in range(schedule.chunks):
        values = [row[chunk] for row in held if row[chunk] is not None]
        if len({value.tree for value in values if value}) > 1:
            raise ScheduleError(
                f"chunk {chunk}: ranks add the contributions in different orders, so their results "
                "differ in rounding"
            )
        if len({value.made for value in values if value}) > 1:
            agreement = "redundant"
    return agreement

"""The ring: every rank talks to its right neighbour only.

    reduce-scatter, round s:  rank r sends chunk (r - 1 - s) mod n, the neighbour adds it
    all-gather, round s:      rank r sends chunk (r - s) mod n, the neighbour keeps it

After n - 1 rounds of the first, rank r owns the complete chunk r; after n - 1 of the second, every
rank holds all of them.  Each rank sends 2 (n - 1) / n of the data, which is the least possible.
Rank r keeps chunk c at slot (r - c) mod n, so that in a round all ranks use the same slots.

Reference: P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", JPDC 69(2), 2009.
"""

from jaxdp.collectives.schedule import Round, Schedule, Slots, transfer


def all_reduce(n: int) -> Schedule:
    """Ring all-reduce: reduce-scatter, then all-gather; 2 (n - 1) rounds."""
    return Schedule(n, n, _reduce_rounds(n) + _gather_rounds(n), _slots(n), "all_reduce")


def reduce_scatter(n: int) -> Schedule:
    """Rank r ends with the complete chunk r; n - 1 rounds."""
    return Schedule(n, n, _reduce_rounds(n), _slots(n), "reduce_scatter")


def all_gather(n: int) -> Schedule:
    """Rank r starts with chunk r and ends with all; n - 1 rounds."""
    return Schedule(n, n, _gather_rounds(n), _slots(n), "all_gather")


def _reduce_rounds(n: int) -> tuple[Round, ...]:
    return tuple(_shift(n, -1 - s, reduce=True) for s in range(n - 1))


def _gather_rounds(n: int) -> tuple[Round, ...]:
    return tuple(_shift(n, -s, reduce=False) for s in range(n - 1))


def _shift(n: int, offset: int, *, reduce: bool) -> Round:
    return (transfer([(r, (r + 1) % n, [(r + offset) % n]) for r in range(n)], reduce=reduce),)


def _slots(n: int) -> Slots:
    return tuple(tuple((r - c) % n for c in range(n)) for r in range(n))

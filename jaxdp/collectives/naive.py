"""The naive way: one rank does everything.

    reduce, round s:     rank s + 1 sends its whole vector to rank 0, which adds it
    broadcast, round s:  rank 0 sends its whole vector to rank s + 1, which keeps it

2 (n - 1) rounds of the whole vector, all through one rank: what the other algorithms improve on.
"""

from jaxdp.collectives.schedule import Round, Schedule, same_slots, transfer


def all_reduce(n: int) -> Schedule:
    """Reduce to rank 0, then broadcast from it; 2 (n - 1) rounds."""
    reduce = tuple((transfer([(r, 0, [0])], reduce=True),) for r in range(1, n))
    return Schedule(n, 1, reduce + _broadcast_rounds(n, 0), same_slots(n, 1), "all_reduce")


def broadcast(n: int, *, root: int = 0) -> Schedule:
    """The root sends its vector to one rank after the other; n - 1 rounds."""
    return Schedule(n, 1, _broadcast_rounds(n, root), same_slots(n, 1), "broadcast", root)


def _broadcast_rounds(n: int, root: int) -> tuple[Round, ...]:
    return tuple((transfer([(root, r, [0])], reduce=False),) for r in range(n) if r != root)

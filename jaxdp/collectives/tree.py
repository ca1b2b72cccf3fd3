"""The binomial tree: half of the ranks hand over what they have, then half of the rest, and so on.

    reduce, d = 1, 2, 4, .. < n:     rank r, where r mod 2 d = d, sends its vector to r - d (adds)
    broadcast, d from large to 1:    rank r, where r mod 2 d = 0, sends its vector to r + d (keeps)

2 ceil(lg n) rounds of the whole vector: for short messages.  Each sum is computed once.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005.
"""

from jaxdp.collectives.schedule import Round, Schedule, same_slots, transfer


def all_reduce(n: int) -> Schedule:
    """Reduce to rank 0, then broadcast from it; 2 ceil(lg n) rounds."""
    reduce = tuple(
        (transfer([(r, r - d, [0]) for r in range(d, n, 2 * d)], reduce=True),)
        for d in _distances(n)
    )
    return Schedule(n, 1, reduce + _broadcast_rounds(n, 0), same_slots(n, 1), "all_reduce")


def broadcast(n: int, *, root: int = 0) -> Schedule:
    """The ranks that have the vector double in number each round; ceil(lg n) rounds."""
    return Schedule(n, 1, _broadcast_rounds(n, root), same_slots(n, 1), "broadcast", root)


def _distances(n: int) -> list[int]:
    return [1 << bit for bit in range((n - 1).bit_length())]


def _broadcast_rounds(n: int, root: int) -> tuple[Round, ...]:
    return tuple(
        (
            transfer(
                [((r - d + root) % n, (r + root) % n, [0]) for r in range(d, n, 2 * d)],
                reduce=False,
            ),
        )
        for d in reversed(_distances(n))
    )

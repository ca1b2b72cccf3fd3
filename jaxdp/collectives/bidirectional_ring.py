"""The bidirectional ring: two rings of half the data, one to the right and one to the left.

    reduce-scatter, round s:  rank r sends chunk 2 ((r - 1 - s) mod n)     to r + 1, which adds it,
                              and chunk        2 ((r + 1 + s) mod n) + 1  to r - 1, which adds it
    all-gather, round s:      chunk 2 ((r - s) mod n) to r + 1 and 2 ((r + s) mod n) + 1 to r - 1

2 (n - 1) rounds as in the ring, with half the bytes on each link: twice as fast where the links to
both neighbours work at once (a torus), no faster where a rank sends one message at a time.

Reference: N. Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning
with Hardware Support for Embeddings", ISCA 2023 (the wraparound links that it uses).
"""

from jaxdp.collectives.schedule import Result, Round, Schedule, Transfer, transfer


def all_reduce(n: int) -> Schedule:
    """Reduce-scatter, then all-gather, both ways round; 2 (n - 1) rounds."""
    return _schedule(n, _reduce_rounds(n) + _gather_rounds(n), "all_reduce")


def reduce_scatter(n: int) -> Schedule:
    """Rank r ends with the complete chunks 2 r and 2 r + 1; n - 1 rounds."""
    return _schedule(n, _reduce_rounds(n), "reduce_scatter")


def all_gather(n: int) -> Schedule:
    """Rank r starts with chunks 2 r and 2 r + 1 and ends with all; n - 1 rounds."""
    return _schedule(n, _gather_rounds(n), "all_gather")


def _reduce_rounds(n: int) -> tuple[Round, ...]:
    return tuple(_both_ways(n, 1 + s, reduce=True) for s in range(n - 1))


def _gather_rounds(n: int) -> tuple[Round, ...]:
    return tuple(_both_ways(n, s, reduce=False) for s in range(n - 1))


def _both_ways(n: int, distance: int, *, reduce: bool) -> Round:
    def shift(step: int, half: int) -> Transfer:
        return transfer(
            [(r, (r + step) % n, [2 * ((r - step * distance) % n) + half]) for r in range(n)],
            reduce=reduce,
        )

    return shift(1, 0), shift(-1, 1)


def _schedule(n: int, rounds: tuple[Round, ...], result: Result) -> Schedule:
    # relative to the rank in the direction of travel, the halves one after the other
    slot = tuple(
        tuple(n * half + (r - c if half == 0 else c - r) % n for c in range(n) for half in (0, 1))
        for r in range(n)
    )
    return Schedule(n, 2 * n, rounds, slot, result)

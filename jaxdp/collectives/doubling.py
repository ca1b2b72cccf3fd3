"""Butterflies: in each round every rank exchanges with a partner whose number differs in one bit.

Let p be the largest power of two that is no larger than n.

    fold:    rank p + e sends its whole vector to rank e, which adds it      (where n > p)
    core:    recursive doubling or halving-doubling among ranks 0 .. p - 1
    unfold:  rank e sends the whole result to rank p + e

    recursive doubling, distance d = 1, 2, .., p/2:
        r and r xor d exchange everything and add: lg p rounds of the whole vector
    halving, d = p/2, .., 2, 1:
        r sends the half of its active chunks that r xor d is responsible for, which adds them
    doubling, d = 1, 2, .., p/2:
        r sends all d chunks that are complete, r xor d keeps them

Recursive doubling has the fewest rounds; each sum is computed on several ranks.  Halving-doubling
has twice as many, but sends only 2 (p - 1) / p of the data, and computes each sum once.  It keeps
chunk c at slot r xor c, so that in a round all ranks use the same slots.

Reference: R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004;
R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005.
"""

from jaxdp.collectives.schedule import Round, Schedule, Slots, same_slots, transfer
from jaxdp.errors import UserError


def recursive_doubling(n: int) -> Schedule:
    """All-reduce in lg p rounds of the whole vector, and two more where n is no power of two."""
    p = _core(n)
    exchange = tuple(
        (transfer([(r, r ^ d, [0]) for r in range(p)], reduce=True),) for d in _distances(p)
    )
    rounds = (*_fold(n, 1), *exchange, *_unfold(n, 1))
    return Schedule(n, 1, rounds, same_slots(n, 1), "all_reduce")


def halving_doubling(n: int) -> Schedule:
    """Rabenseifner's all-reduce in 2 lg p rounds, and two more where n is no power of two."""
    p = _core(n)
    rounds = (*_fold(n, p), *_halving(p), *_doubling(p), *_unfold(n, p))
    return Schedule(n, p, rounds, _slots(n, p), "all_reduce")


def reduce_scatter(n: int) -> Schedule:
    """Recursive halving: rank r ends with the complete chunk r; lg n rounds.

    Raises:
      UserError: n is no power of two.
    """
    _check_power_of_two(n, "reduce_scatter")
    return Schedule(n, n, _halving(n), _slots(n, n), "reduce_scatter")


def all_gather(n: int) -> Schedule:
    """Recursive doubling of what is held: rank r starts with chunk r; lg n rounds.

    Raises:
      UserError: n is no power of two.
    """
    _check_power_of_two(n, "all_gather")
    return Schedule(n, n, _doubling(n), _slots(n, n), "all_gather")


def _core(n: int) -> int:
    return 1 << n.bit_length() - 1


def _check_power_of_two(n: int, result: str) -> None:
    if n != _core(n):
        raise UserError(
            f"halving_doubling: {result} on {n} ranks; expected a power of two: use ring"
        )


def _distances(p: int) -> list[int]:
    return [1 << bit for bit in range(p.bit_length() - 1)]


def _slots(n: int, p: int) -> Slots:
    return tuple(tuple(r % p ^ c for c in range(p)) for r in range(n))


def _fold(n: int, chunks: int) -> list[Round]:
    # chunks in the order of their slots: the whole vector as it is held
    p = _core(n)
    moves = [(p + e, e, [e % chunks ^ s for s in range(chunks)]) for e in range(n - p)]
    return [(transfer(moves, reduce=True),)] if moves else []


def _unfold(n: int, chunks: int) -> list[Round]:
    p = _core(n)
    moves = [(e, p + e, [e % chunks ^ s for s in range(chunks)]) for e in range(n - p)]
    return [(transfer(moves, reduce=False),)] if moves else []


def _halving(p: int) -> tuple[Round, ...]:
    return tuple(
        (transfer([(r, r ^ d, [r ^ s for s in range(d, 2 * d)]) for r in range(p)], reduce=True),)
        for d in reversed(_distances(p))
    )


def _doubling(p: int) -> tuple[Round, ...]:
    return tuple(
        (transfer([(r, r ^ d, [r ^ s for s in range(d)]) for r in range(p)], reduce=False),)
        for d in _distances(p)
    )

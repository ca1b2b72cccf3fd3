"""Two levels on a flat axis: rings inside nodes, then rings between nodes, then inside again.

Rank r = g L + i is number i of the L ranks of node g; G = n / L nodes.  Chunk b L + a has the local
coordinate a and the node coordinate b.

    local reduce-scatter, round s:  (g, i) sends the G chunks of a = (i - 1 - s) mod L to (g, i + 1)
    node reduce-scatter, round s:   (g, i) sends chunk a = i, b = (g - 1 - s) mod G to (g + 1, i)
    node all-gather, round s:       (g, i) sends chunk a = i, b = (g - s) mod G to (g + 1, i)
    local all-gather, round s:      (g, i) sends the G chunks of a = (i - s) mod L to (g, i + 1)

2 (L - 1) + 2 (G - 1) rounds; a rank sends 2 (n - 1) / n of the data as in the ring, but only
2 (G - 1) / n of it to another node.  It keeps the chunk at slot ((i - a) mod L) G + (g - b) mod G.

Reference: X. Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision:
Training ImageNet in Four Minutes", 2018; H. Mikami et al., "Massively Distributed SGD", 2018
(2D-torus all-reduce).
"""

from math import isqrt

from jaxdp.collectives.schedule import Result, Round, Schedule, transfer
from jaxdp.errors import UserError


def all_reduce(n: int, *, local_size: int | None = None) -> Schedule:
    """Local reduce-scatter, all-reduce between nodes, local all-gather.

    Args:
      n: number of ranks.
      local_size: ranks per node, consecutive on the axis; None: the largest divisor of n up to
        sqrt(n), which has the fewest rounds.

    Raises:
      UserError: `local_size` does not divide n.
    """
    local = ranks_per_node(n, local_size)
    rounds = (
        *_local_rounds(n, local, reduce=True),
        *_node_rounds(n, local, reduce=True),
        *_node_rounds(n, local, reduce=False),
        *_local_rounds(n, local, reduce=False),
    )
    return _schedule(n, local, rounds, "all_reduce")


def reduce_scatter(n: int, *, local_size: int | None = None) -> Schedule:
    """Inside nodes, then between them; (L - 1) + (G - 1) rounds.  Arguments as for `all_reduce`."""
    local = ranks_per_node(n, local_size)
    rounds = (*_local_rounds(n, local, reduce=True), *_node_rounds(n, local, reduce=True))
    return _schedule(n, local, rounds, "reduce_scatter")


def all_gather(n: int, *, local_size: int | None = None) -> Schedule:
    """Between nodes, then inside them; (L - 1) + (G - 1) rounds.  Arguments as for `all_reduce`."""
    local = ranks_per_node(n, local_size)
    rounds = (*_node_rounds(n, local, reduce=False), *_local_rounds(n, local, reduce=False))
    return _schedule(n, local, rounds, "all_gather")


def ranks_per_node(n: int, local_size: int | None) -> int:
    """`local_size`, or what stands for None.  Raises UserError if it does not divide n."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    if local_size is None:
        return max(d for d in divisors if d <= isqrt(n))
    if local_size not in divisors:
        raise UserError(
            f"hierarchical: local_size={local_size} on {n} ranks; expected a divisor of {n}: "
            f"one of {', '.join(map(str, divisors))}"
        )
    return local_size


def _local_rounds(n: int, local: int, *, reduce: bool) -> list[Round]:
    def moves(distance: int):
        for r in range(n):
            node, i = divmod(r, local)
            a = (i - distance) % local
            # in the order of their slots
            chunks = [(node - t) % (n // local) * local + a for t in range(n // local)]
            yield r, node * local + (i + 1) % local, chunks

    first = 1 if reduce else 0
    return [(transfer(moves(first + s), reduce=reduce),) for s in range(local - 1)]


def _node_rounds(n: int, local: int, *, reduce: bool) -> list[Round]:
    first = 1 if reduce else 0
    return [
        (
            transfer(
                # one step to the next node, and the owner's rank number is the chunk's
                [(r, (r + local) % n, [(r - (first + s) * local) % n]) for r in range(n)],
                reduce=reduce,
            ),
        )
        for s in range(n // local - 1)
    ]


def _schedule(n: int, local: int, rounds: tuple[Round, ...], result: Result) -> Schedule:
    nodes = n // local
    slot = tuple(
        tuple((r - c) % local * nodes + (r // local - c // local) % nodes for c in range(n))
        for r in range(n)
    )
    return Schedule(n, n, rounds, slot, result)

"""Top-k: of all gradients a device sends the k largest in magnitude; the others wait.

The k are chosen from one vector of all gradients, not leaf by leaf: of all choices of k numbers it
leaves the least behind (in the Euclidean norm), and it takes two messages, whatever the model.  A
leaf with small gradients waits until its residual is among the largest.

Ranks choose different places, so nothing can be added on the way: everyone gets everyone's k values
and places, 8 (n - 1) k bytes sent, and adds them in the order of the ranks.  That is fewer bytes
than an all-reduce's 8 (n - 1) / n of d numbers only where k < d / n.

Reference: N. Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
Interspeech 2015; Y. Lin et al., "Deep Gradient Compression", ICLR 2018.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.collectives import algorithms_for, all_gather
from jaxdp.collectives.planning import planned_all_gather
from jaxdp.errors import UserError
from jaxdp.plan import Planned
from jaxdp.sync.buckets import join, part
from jaxdp.sync.feedback import Compressor, Leaves, error_feedback
from jaxdp.sync.types import GradSync
from jaxdp.types import PyTree

_MOST = 2**31 - 1  # places travel as int32


def top_k_sync(fraction: float = 0.01, *, algorithm: str = "psum") -> GradSync:
    """Sums the largest gradients of every device, with error feedback; all else exactly.

    Args:
      fraction: of the gradients' elements that a device sends in a step, above 0 and at most 1; to
        the nearest whole element, and at least one.
      algorithm: a row of `jaxdp.collectives.ALGORITHMS` that has an all-gather.

    Raises:
      UserError: the fraction is out of range, or the algorithm has no all-gather; from `init`: the
        parameters are too many to be numbered in int32.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction: {fraction}; expected above 0 and at most 1")
    if algorithm not in (have := algorithms_for("all_gather")):
        raise UserError(
            f"algorithm: {algorithm} has no all-gather, which top-k needs; expected one of "
            f"{', '.join(have)}"
        )

    def init(leaves: Leaves) -> tuple[()]:
        if (size := sum(leaf.size for leaf in leaves)) > _MOST:
            raise UserError(f"top_k: {size} gradients; expected at most {_MOST}")
        return ()

    def reduce(leaves: Leaves, start: PyTree, axis_name: str) -> tuple[Leaves, Leaves, PyTree]:
        vector = join(leaves)
        _, places = lax.top_k(jnp.abs(vector), _count(fraction, vector.size))
        values = all_gather(vector[places], axis_name, algorithm=algorithm)
        theirs = all_gather(places, axis_name, algorithm=algorithm)
        shape = (lax.axis_size(axis_name), places.size)
        summed = _sum_in_order(values.reshape(shape), theirs.reshape(shape), vector.size)
        left = vector.at[places].set(0, unique_indices=True)
        return part(summed, leaves), part(left, leaves), start

    def plan(leaves: Leaves, n: int) -> tuple[Planned, ...]:
        k = _count(fraction, sum(leaf.size for leaf in leaves))
        wide = leaves[0].dtype.itemsize
        return (
            *planned_all_gather("values", algorithm, k, wide, n),
            *planned_all_gather("indices", algorithm, k, np.dtype(np.int32).itemsize, n),
        )

    def fits(leaf: Any) -> bool:
        return leaf.size > 0

    return error_feedback(Compressor(fits, init, reduce, plan), algorithm)


def _count(fraction: float, size: int) -> int:
    return max(1, round(fraction * size))


def _sum_in_order(values: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """One rank after another: a place that several ranks send is added in one order everywhere.

    Args:
      values, places: `[ranks, k]`; the places of a rank are distinct.
      size: of the vector.
    """

    def add(total: jax.Array, sent: tuple[Any, Any]) -> tuple[jax.Array, None]:
        value, place = sent
        return total.at[place].add(value, unique_indices=True), None

    return lax.scan(add, jnp.zeros(size, values.dtype), (values, places))[0]

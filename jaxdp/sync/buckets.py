"""Buckets: gradients joined into few reductions, those that are ready first in front.

The backward pass begins with the last layer and ends with the first.  A small first bucket starts
the communication early; large ones after it pay each reduction's latency seldom.

Reference: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.errors import UserError
from jaxdp.types import PyTree

FIRST_BYTES = 1 << 20  # DDP's


class Bucket(NamedTuple):
    """Leaves that are reduced together.

    Attributes:
      leaves: their numbers in JAX's order of the tree, all of one dtype.
      dtype: of these leaves.
    """

    leaves: tuple[int, ...]
    dtype: Any


def plan_buckets(
    tree: PyTree,
    cap_bytes: int | None = None,
    first_bytes: int | None = None,
    order: Sequence[int] | None = None,
) -> tuple[Bucket, ...]:
    """Cuts a tree into buckets.

    Args:
      tree: arrays, or their shapes and dtypes.
      cap_bytes: the most that a bucket holds; None: one bucket per dtype.  A leaf that is larger
        makes a bucket of its own.
      first_bytes: the cap of the first bucket of each dtype; None: 1 MiB, or `cap_bytes` if that is
        less.
      order: the leaves' numbers as they become ready, such as `ready_order` finds; None: the last
        leaf first, right where names sort in the order of the layers.

    Returns:
      Buckets in the order in which they are complete, each leaf in exactly one.

    Raises:
      UserError: `order` does not hold every leaf's number once.
    """
    leaves = jax.tree.leaves(tree)
    order = tuple(reversed(range(len(leaves)))) if order is None else tuple(order)
    if sorted(order) != list(range(len(leaves))):
        raise UserError(f"order: {order} of {len(leaves)} leaves; expected each number once")
    if cap_bytes is not None:
        first_bytes = min(FIRST_BYTES, cap_bytes) if first_bytes is None else first_bytes
    filling: dict[Any, list[int]] = {}
    room: dict[Any, float] = defaultdict(
        lambda: float("inf") if first_bytes is None else first_bytes
    )
    full: list[Bucket] = []
    for i in order:
        dtype, nbytes = jnp.dtype(leaves[i].dtype), leaves[i].size * leaves[i].dtype.itemsize
        if filling.get(dtype) and nbytes > room[dtype]:
            full.append(Bucket(tuple(filling.pop(dtype)), dtype))
            room[dtype] = float("inf") if cap_bytes is None else cap_bytes
        filling.setdefault(dtype, []).append(i)
        room[dtype] -= nbytes
    full += [Bucket(tuple(numbers), dtype) for dtype, numbers in filling.items()]
    ready = {i: when for when, i in enumerate(order)}
    return tuple(sorted(full, key=lambda bucket: ready[bucket.leaves[-1]]))


def add_riders(buckets: Sequence[Bucket], leaves: Sequence[Any], riders: Iterable[int]) -> tuple:
    """Buckets with the leaves `riders` in the first one of their dtype, outside its cap.

    A rider whose dtype no bucket has gets a bucket, before all others.
    """
    found = list(buckets)
    for i in riders:
        dtype = jnp.dtype(leaves[i].dtype)
        at = next((k for k, bucket in enumerate(found) if bucket.dtype == dtype), None)
        if at is None:
            found.insert(0, Bucket((i,), dtype))
        else:
            found[at] = found[at]._replace(leaves=(*found[at].leaves, i))
    return tuple(found)


def join(leaves: Sequence[jax.Array]) -> jax.Array:
    """Leaves of one dtype as one vector."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def part(vector: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
    """A vector cut into leaves shaped as those of `like`: the inverse of `join`."""
    parts, start = [], 0
    for leaf in like:
        piece = lax.slice_in_dim(vector, start, start + leaf.size)
        parts.append(piece.reshape(leaf.shape))
        start += leaf.size
    return parts


def joined(
    reduce: Callable[[jax.Array], jax.Array], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """Applies a reduction of vectors to leaves of one dtype."""
    return part(reduce(join(leaves)), leaves)

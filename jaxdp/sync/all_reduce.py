"""All-reduce of a whole tree: one reduction per dtype, whatever the algorithm."""

from collections import defaultdict

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.collectives import all_reduce, get_algorithm, tuning
from jaxdp.sync.types import GradSync
from jaxdp.trees import count_bytes
from jaxdp.types import PyTree


def all_reduce_sync(algorithm: str = "psum") -> GradSync:
    """Sums every leaf over all devices.

    psum takes the leaves as they are: the compiler joins them into one all-reduce without a copy.
    An explicit algorithm gets one concatenated vector per dtype, so that its 2 (n - 1) messages are
    paid once and not once per leaf.

    Args:
      algorithm: a row of `jaxdp.collectives.ALGORITHMS`, or "auto" (see `all_reduce`).

    Raises:
      UserError: there is no such algorithm.
    """
    if algorithm != "auto":
        get_algorithm(algorithm)

    def update(tree: PyTree, state: PyTree, axis_name: str) -> tuple[PyTree, PyTree]:
        name = algorithm
        if name == "auto":
            name = tuning.choose(count_bytes(tree), lax.axis_size(axis_name)).algorithm
        if name == "psum":
            return lax.psum(tree, axis_name), state
        return _reduce_buckets(tree, axis_name, name), state

    return GradSync(lambda tree: (), update)


def _reduce_buckets(tree: PyTree, axis_name: str, algorithm: str) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    by_dtype = defaultdict(list)
    for i, leaf in enumerate(leaves):
        by_dtype[leaf.dtype].append(i)
    for numbers in by_dtype.values():
        bucket = jnp.concatenate([leaves[i].reshape(-1) for i in numbers])
        summed = all_reduce(bucket, axis_name, algorithm=algorithm)
        start = 0
        for i in numbers:
            size = leaves[i].size
            leaves[i] = lax.slice_in_dim(summed, start, start + size).reshape(leaves[i].shape)
            start += size
    return jax.tree.unflatten(structure, leaves)

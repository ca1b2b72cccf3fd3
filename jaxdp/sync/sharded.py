"""Reduce-scatter of gradients: each device gets the sum of its own share, 1/N of every leaf.

A leaf's elements, padded to N * k, are cut into N shares of k in row-major order.  A share keeps
the leaf's number of dims, `[k, 1, ..., 1]`, so that what an optimizer decides by dims (weight decay
of matrices) is the same for it.  Scalars are not cut: every device has them whole.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.collectives import algorithms_for, all_gather, get_algorithm, reduce_scatter
from jaxdp.collectives.codec import CODECS
from jaxdp.collectives.encoded import (
    DIRECT,
    planned_reduce_scatter_encoded,
    reduce_scatter_encoded,
)
from jaxdp.collectives.planning import planned_all_gather, planned_reduce_scatter
from jaxdp.errors import UserError
from jaxdp.plan import Plan, Planned
from jaxdp.sync.wire import WIRES
from jaxdp.types import PyTree


class ShardedSync(NamedTuple):
    """The two halves of an all-reduce, with room for an update of the shares between them.

    Attributes:
      reduce_scatter: (tree of this device's sums, axis_name) -> its shares of the global sums.
      all_gather: (shares, tree of the leaves' shapes, axis_name) -> the leaves.
      plan: (sums and parameters as shapes, n) -> the collectives of both.
    """

    reduce_scatter: Callable[[PyTree, str], PyTree]
    all_gather: Callable[[PyTree, PyTree, str], PyTree]
    plan: Callable[[PyTree, PyTree, int], Plan]


def sharded_sync(algorithm: str = "psum", wire: str = "float32") -> ShardedSync:
    """Both halves by one algorithm, leaves of one dtype in one message.

    Args:
      algorithm: a row of `jaxdp.collectives.ALGORITHMS` with a reduce-scatter and an all-gather.
      wire: how gradients travel, see `sync.wire`; what is gathered travels as it is.

    Raises:
      UserError: the algorithm has no reduce-scatter, or cannot carry the wire.
    """
    _check(algorithm, wire)

    def scatter(tree: PyTree, axis_name: str) -> PyTree:
        n = lax.axis_size(axis_name)
        leaves, structure = jax.tree.flatten(tree)
        for numbers in _groups(leaves):
            rows = jnp.concatenate([cut(leaves[i], n) for i in numbers], 1)
            mine = rows[0] if n == 1 else _scatter(rows, axis_name)
            start = 0
            for i in numbers:
                k = share_length(leaves[i].size, n)
                leaves[i] = _as_share(lax.slice_in_dim(mine, start, start + k), leaves[i].ndim)
                start += k
        return jax.tree.unflatten(structure, leaves)

    def _scatter(rows: jax.Array, axis_name: str) -> jax.Array:
        if wire != "float32":
            codec = CODECS[wire](len(rows))
            return reduce_scatter_encoded(rows, codec, axis_name, algorithm)
        return reduce_scatter(rows.reshape(-1), axis_name, algorithm=algorithm)

    def gather(shares: PyTree, like: PyTree, axis_name: str) -> PyTree:
        n = lax.axis_size(axis_name)
        leaves, structure = jax.tree.flatten(shares)
        shapes = jax.tree.leaves(like)
        for numbers in _groups(shapes):
            mine = jnp.concatenate([leaves[i].reshape(-1) for i in numbers])
            rows = mine if n == 1 else all_gather(mine, axis_name, algorithm=algorithm)
            rows, start = rows.reshape(n, -1), 0
            for i in numbers:
                k = share_length(shapes[i].size, n)
                part = lax.slice_in_dim(rows, start, start + k, axis=1)
                leaves[i] = uncut(part, shapes[i].shape)
                start += k
        return jax.tree.unflatten(structure, leaves)

    def plan(sums: PyTree, params: PyTree, n: int) -> Plan:
        found: list[Planned] = []
        if n > 1:
            for part, itemsize in _messages(sums, n):
                found += _planned_scatter(part, itemsize, n)
            for part, itemsize in _messages(params, n):
                found += planned_all_gather("parameters", algorithm, part, itemsize, n)
        return Plan(tuple(found))

    def _planned_scatter(part: int, itemsize: int, n: int) -> tuple[Planned, ...]:
        if wire != "float32":
            return planned_reduce_scatter_encoded("gradients", part, CODECS[wire](n), algorithm, n)
        return planned_reduce_scatter("gradients", algorithm, part, itemsize, n)

    return ShardedSync(scatter, gather, plan)


def share_length(size: int, n: int) -> int:
    """Elements of each of `n` shares."""
    return -(-size // n)


def cut(leaf: jax.Array, n: int) -> jax.Array:
    """A leaf as `[n, k]`, a row for each device, padded with zeros."""
    k = share_length(leaf.size, n)
    return jnp.pad(leaf.reshape(-1), (0, n * k - leaf.size)).reshape(n, k)


def uncut(rows: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The inverse of `cut`."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def my_shares(tree: PyTree, axis_name: str) -> PyTree:
    """This device's share of every leaf, inside `shard_map`; scalars whole."""
    return shares_of(tree, lax.axis_index(axis_name), lax.axis_size(axis_name))


def shares_of(tree: PyTree, rank: jax.Array | int, n: int) -> PyTree:
    """The share that device `rank` of `n` has of every leaf; scalars whole."""

    def share(leaf: jax.Array) -> jax.Array:
        if not leaf.ndim:
            return leaf
        mine = lax.dynamic_index_in_dim(cut(leaf, n), rank, keepdims=False)
        return _as_share(mine, leaf.ndim)

    return jax.tree.map(share, tree)


def all_shares(leaf: jax.Array, n: int) -> jax.Array:
    """The shares of all devices one after the other, `[n * k, 1, ..., 1]`; scalars whole."""
    return _as_share(cut(leaf, n).reshape(-1), leaf.ndim) if leaf.ndim else leaf


def _as_share(vector: jax.Array, ndim: int) -> jax.Array:
    return vector.reshape(-1, *[1] * (ndim - 1))


def _groups(leaves: Sequence[Any]) -> list[list[int]]:
    """Numbers of the leaves that are cut, dtype by dtype."""
    by_dtype: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.ndim:
            by_dtype.setdefault(jnp.dtype(leaf.dtype), []).append(i)
    return list(by_dtype.values())


def _messages(tree: PyTree, n: int) -> list[tuple[int, int]]:
    """(elements of a share, bytes of an element) of each message that is not empty."""
    leaves = jax.tree.leaves(tree)
    found = [
        (sum(share_length(leaves[i].size, n) for i in numbers), leaves[numbers[0]].dtype.itemsize)
        for numbers in _groups(leaves)
    ]
    return [message for message in found if message[0]]


def _check(algorithm: str, wire: str) -> None:
    if algorithm != "auto":
        get_algorithm(algorithm)
    gathering = algorithms_for("all_gather")
    possible = [name for name in algorithms_for("reduce_scatter") if name in gathering]
    if algorithm not in possible:
        raise UserError(
            f"algorithm: {algorithm} has no reduce-scatter, so the optimizer cannot be sharded; "
            f"expected one of {', '.join(possible)}"
        )
    if wire not in WIRES:
        raise UserError(f"wire: {wire!r} is not known; expected one of {', '.join(WIRES)}")
    if wire == "int8" and algorithm not in DIRECT:
        raise UserError(
            f"wire: int8 cannot be added on the way, as {algorithm} does; expected algorithm "
            f"{' or '.join(DIRECT)}"
        )

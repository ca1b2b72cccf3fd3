"""The compiler's own collectives, in the shape of ours: (array, axis name, op) -> array."""

from functools import reduce

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax

from jaxdp.collectives import ring
from jaxdp.collectives.execute import execute
from jaxdp.collectives.ops import Op, get_op


def all_reduce(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """`lax.psum`, `pmax`, `pmin`; a product, which lax lacks, is gathered and multiplied."""
    if op is get_op("product"):
        return all_gather_sum(x, axis_name, op)
    if op is get_op("sum"):
        return lax.psum(x, axis_name)
    result = (lax.pmax if op is get_op("max") else lax.pmin)(x, axis_name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return result
    # XLA:CPU's all-reduce drops NaN from a maximum
    any_nan = lax.pmax(jnp.isnan(x).astype(jnp.int8), axis_name)
    return jnp.where(any_nan > 0, jnp.asarray(jnp.nan, x.dtype), result)


def all_gather_sum(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """Every rank gathers all arrays and reduces them itself, in the order of the ranks.

    One round of n - 1 times the data: for short vectors.  All ranks run one program on the same
    gathered bits, their own included, so they agree although each computes the sum.
    """
    return _reduce_rows(lax.all_gather(x, axis_name), op)


def psum_scatter_gather(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """Reduce-scatter, then all-gather, both the compiler's."""
    if not x.size:
        return x
    n = lax.axis_size(axis_name)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n), constant_values=op.identity(x.dtype))
    whole = all_gather(reduce_scatter(flat, axis_name, op), axis_name, op)
    return whole[: x.size].reshape(x.shape)


def all_to_all(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """Rank r gets chunk r from all, reduces them in the order of the ranks, and all gather it.

    As few bytes as a ring, in two steps; each element is computed once, then copied.
    """
    if not x.size:
        return x
    n = lax.axis_size(axis_name)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n), constant_values=op.identity(x.dtype))
    whole = all_gather(all_to_all_scatter(flat, axis_name, op), axis_name, op)
    return whole[: x.size].reshape(x.shape)


def all_to_all_scatter(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """The first half of `all_to_all`: rank r ends with part r."""
    n = lax.axis_size(axis_name)
    if not x.size:
        return x[: len(x) // n]
    rows = x.reshape(n, x.shape[0] // n, *x.shape[1:])
    return _reduce_rows(lax.all_to_all(rows, axis_name, 0, 0), op)


def reduce_scatter(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """`lax.psum_scatter`; for the other ops, `lax.all_to_all` and a local reduction."""
    n = lax.axis_size(axis_name)
    if not x.size:
        return x[: len(x) // n]
    if op is get_op("sum"):
        # Gloo's reduce-scatter returns wrong numbers (https://github.com/jax-ml/jax/issues/40830);
        # may go when jaxlib >= 0.12 is the oldest we support
        if psum_scatter_is_wrong(jax.default_backend(), jax.process_count(), jaxlib.__version__):
            return execute(ring.reduce_scatter(n), x, axis_name, op)
        return lax.psum_scatter(x, axis_name, tiled=True)
    return all_to_all_scatter(x, axis_name, op)


def psum_scatter_is_wrong(platform: str, processes: int, jaxlib_version: str) -> bool:
    """Whether `lax.psum_scatter` goes over a Gloo that returns wrong numbers."""
    major, minor = (int(part) for part in jaxlib_version.split(".")[:2])
    return platform == "cpu" and processes > 1 and (major, minor) < (0, 12)


def all_gather(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """`lax.all_gather`, tiled along the first dimension."""
    if not x.size:  # which lax refuses
        return jnp.concatenate([x] * lax.axis_size(axis_name))
    return lax.all_gather(x, axis_name, tiled=True)


def broadcast(x: jax.Array, axis_name: str, op: Op, *, root: int = 0) -> jax.Array:
    """`lax.psum` of the root's bits and zeros: lax has no broadcast that runs on every platform."""
    bits = x
    if jnp.issubdtype(x.dtype, jnp.floating):  # as integers, so that -0.0 and NaN arrive as sent
        bits = lax.bitcast_convert_type(x, f"uint{x.dtype.itemsize * 8}")
    mine = lax.axis_index(axis_name) == root
    sent = lax.psum(jnp.where(mine, bits, jnp.zeros_like(bits)), axis_name)
    return lax.bitcast_convert_type(sent, x.dtype)


def _reduce_rows(rows: jax.Array, op: Op) -> jax.Array:
    """Row after row; 16-bit floats in float32, which rounds once and not n times."""
    narrow = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize == 2
    wide = rows.astype(jnp.float32) if narrow else rows
    return reduce(op.combine, [wide[i] for i in range(len(wide))]).astype(rows.dtype)

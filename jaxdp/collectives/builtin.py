"""The compiler's own collectives, in the shape of ours."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.collectives.ops import Op, get_op


def all_reduce(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """`lax.psum`, `pmax`, `pmin`; a product, which lax lacks, is gathered and multiplied."""
    if op is get_op("product"):
        return jnp.prod(lax.all_gather(x, axis_name), axis=0, dtype=x.dtype)
    if op is get_op("sum"):
        return lax.psum(x, axis_name)
    result = (lax.pmax if op is get_op("max") else lax.pmin)(x, axis_name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return result
    # XLA:CPU's all-reduce drops NaN from a maximum
    any_nan = lax.pmax(jnp.isnan(x).astype(jnp.int8), axis_name)
    return jnp.where(any_nan > 0, jnp.asarray(jnp.nan, x.dtype), result)


def reduce_scatter(x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """`lax.psum_scatter`; for the other ops, all-reduce and keep the own part."""
    if op is get_op("sum"):
        return lax.psum_scatter(x, axis_name, tiled=True)
    n = lax.axis_size(axis_name)
    length = x.shape[0] // n
    whole = all_reduce(x, axis_name, op)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * length, length)


def all_gather(x: jax.Array, axis_name: str) -> jax.Array:
    """`lax.all_gather`, tiled along the first dimension."""
    return lax.all_gather(x, axis_name, tiled=True)

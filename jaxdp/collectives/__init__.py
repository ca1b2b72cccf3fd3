"""Collectives whose algorithm can be chosen.  All are called inside `shard_map`, on a mesh axis.

They sum (or take the max, min, product); nothing here divides.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.collectives import builtin
from jaxdp.collectives.execute import execute
from jaxdp.collectives.ops import OPS, get_op
from jaxdp.collectives.schedule import Result, Schedule, Transfer
from jaxdp.collectives.simulate import simulate, trace
from jaxdp.collectives.table import ALGORITHMS, Algorithm, get_algorithm
from jaxdp.collectives.verify import ScheduleError, verify
from jaxdp.errors import UserError

__all__ = [
    "ALGORITHMS",
    "OPS",
    "Algorithm",
    "Schedule",
    "ScheduleError",
    "Transfer",
    "all_gather",
    "all_reduce",
    "make_schedule",
    "reduce_scatter",
    "simulate",
    "trace",
    "verify",
]


def all_reduce(
    x: jax.Array, axis_name: str, *, algorithm: str = "psum", op: str = "sum"
) -> jax.Array:
    """Every rank gets the reduction of all ranks' arrays.

    Args:
      x: this rank's array, any shape and size, floating point or integer.
      axis_name: the mesh axis to reduce over.
      algorithm: a row of `ALGORITHMS`.
      op: "sum", "max", "min" or "product".

    Returns:
      An array of the shape and dtype of `x`, equal to the bit on every rank.

    Raises:
      UserError: the algorithm, the op or the dtype is not supported.
    """
    x = _check(x)
    get_algorithm(algorithm)
    if algorithm == "psum":
        return builtin.all_reduce(x, axis_name, get_op(op))
    schedule = make_schedule(algorithm, "all_reduce", lax.axis_size(axis_name))
    return execute(schedule, x, axis_name, get_op(op))


def reduce_scatter(
    x: jax.Array, axis_name: str, *, algorithm: str = "psum", op: str = "sum"
) -> jax.Array:
    """Rank r gets part r of the reduction of all ranks' arrays.

    Args:
      x: `[n * k, ...]`, n the number of ranks on the axis.
      axis_name, algorithm, op: as for `all_reduce`.

    Returns:
      `[k, ...]`: rows r * k to (r + 1) * k of the reduction.

    Raises:
      UserError: as for `all_reduce`, or n does not divide the first dimension, or the algorithm has
        no reduce-scatter.
    """
    x = _check(x)
    n = lax.axis_size(axis_name)
    if x.ndim == 0 or x.shape[0] % n:
        raise UserError(
            f"reduce_scatter: shape {x.shape} on {n} ranks; expected a first dimension that is a "
            f"multiple of {n}: pad it"
        )
    get_algorithm(algorithm)
    if algorithm == "psum":
        return builtin.reduce_scatter(x, axis_name, get_op(op))
    return execute(make_schedule(algorithm, "reduce_scatter", n), x, axis_name, get_op(op))


def all_gather(x: jax.Array, axis_name: str, *, algorithm: str = "psum") -> jax.Array:
    """Every rank gets all ranks' arrays, one after the other.

    Args:
      x: `[k, ...]`.
      axis_name, algorithm: as for `all_reduce`.

    Returns:
      `[n * k, ...]`, rank r's rows at r * k.

    Raises:
      UserError: as for `all_reduce`, or `x` is a scalar, or the algorithm has no all-gather.
    """
    x = _check(x)
    if x.ndim == 0:
        raise UserError("all_gather: a scalar was given; expected at least one dimension: x[None]")
    get_algorithm(algorithm)
    if algorithm == "psum":
        return builtin.all_gather(x, axis_name)
    schedule = make_schedule(algorithm, "all_gather", lax.axis_size(axis_name))
    return execute(schedule, x, axis_name, get_op("sum"))


@lru_cache(maxsize=64)
def make_schedule(algorithm: str, result: Result, n: int) -> Schedule:
    """The schedule of an algorithm for `n` ranks.

    Raises:
      UserError: the algorithm has no schedule for this collective.
    """
    factory = getattr(get_algorithm(algorithm), result)
    if factory is None:
        have = [name for name, row in ALGORITHMS.items() if getattr(row, result)]
        raise UserError(f"{algorithm} has no {result} schedule; expected one of {', '.join(have)}")
    return factory(n)


def _check(x) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
        raise UserError(
            f"dtype {x.dtype} cannot be reduced; expected floating point or integers: cast it"
        )
    return x

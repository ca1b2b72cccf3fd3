"""Collectives whose algorithm can be chosen.  All are called inside `shard_map`, on a mesh axis.

They sum (or take the max, min, product); nothing here divides.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.collectives import tuning
from jaxdp.collectives.cost import Links, Traffic, predict_s, traffic
from jaxdp.collectives.ops import OPS, get_op
from jaxdp.collectives.schedule import Result, Schedule, Transfer
from jaxdp.collectives.simulate import simulate, trace
from jaxdp.collectives.table import (
    ALGORITHMS,
    Algorithm,
    algorithms_for,
    get_algorithm,
    make_schedule,
    run,
)
from jaxdp.collectives.verify import ScheduleError, verify
from jaxdp.errors import UserError

__all__ = [
    "ALGORITHMS",
    "OPS",
    "Algorithm",
    "Links",
    "Result",
    "Schedule",
    "ScheduleError",
    "Traffic",
    "Transfer",
    "algorithms_for",
    "all_gather",
    "all_reduce",
    "broadcast",
    "get_algorithm",
    "make_schedule",
    "predict_s",
    "reduce_scatter",
    "simulate",
    "trace",
    "traffic",
    "verify",
]


def all_reduce(
    x: jax.Array, axis_name: str, *, algorithm: str = "psum", op: str = "sum", **options: int | None
) -> jax.Array:
    """Every rank gets the reduction of all ranks' arrays.

    Args:
      x: this rank's array (or number), any shape and size, floating point or integer.
      axis_name: the mesh axis to reduce over.
      algorithm: a row of `ALGORITHMS`, or "auto": what `python -m jaxdp.compare --tune` found
        fastest here for this size, else psum.
      op: "sum", "max", "min" or "product".
      **options: the algorithm's own, such as `local_size` of hierarchical.

    Returns:
      An array of the shape and dtype of `x`, equal to the bit on every rank.

    Raises:
      UserError: the algorithm, an option, the op or the dtype is not supported, `x` is not one
        array, or there is no such axis here.
    """
    x, n = _check(x, axis_name)
    if algorithm == "auto":
        nbytes = x.size * x.dtype.itemsize
        algorithm = tuning.choose(nbytes, n).algorithm
    return run("all_reduce", algorithm, x, axis_name, get_op(op), options)


def reduce_scatter(
    x: jax.Array, axis_name: str, *, algorithm: str = "psum", op: str = "sum", **options: int | None
) -> jax.Array:
    """Rank r gets part r of the reduction of all ranks' arrays.

    Args:
      x: `[n * k, ...]`, n the number of ranks on the axis.
      axis_name, algorithm, op, **options: as for `all_reduce`.

    Returns:
      `[k, ...]`: rows r * k to (r + 1) * k of the reduction.

    Raises:
      UserError: as for `all_reduce`, or n does not divide the first dimension, or the algorithm has
        no reduce-scatter.
    """
    x, n = _check(x, axis_name)
    if x.ndim == 0 or x.shape[0] % n:
        raise UserError(
            f"reduce_scatter: shape {x.shape} on {n} ranks; expected a first dimension that is a "
            f"multiple of {n}: pad it"
        )
    return run("reduce_scatter", algorithm, x, axis_name, get_op(op), options)


def all_gather(
    x: jax.Array, axis_name: str, *, algorithm: str = "psum", **options: int | None
) -> jax.Array:
    """Every rank gets all ranks' arrays, one after the other.

    Args:
      x: `[k, ...]`.
      axis_name, algorithm, **options: as for `all_reduce`.

    Returns:
      `[n * k, ...]`, rank r's rows at r * k.

    Raises:
      UserError: as for `all_reduce`, or `x` is a scalar, or the algorithm has no all-gather.
    """
    x, _ = _check(x, axis_name)
    if x.ndim == 0:
        raise UserError("all_gather: a scalar was given; expected at least one dimension: x[None]")
    return run("all_gather", algorithm, x, axis_name, get_op("sum"), options)


def broadcast(
    x: jax.Array, axis_name: str, *, root: int = 0, algorithm: str = "psum", **options: int | None
) -> jax.Array:
    """Every rank gets the root's array, to the bit.

    Args:
      x: this rank's array, of one shape and dtype on all ranks.
      axis_name, algorithm, **options: as for `all_reduce`.
      root: the rank whose array is spread.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      UserError: as for `all_reduce`, or there is no rank `root`, or the algorithm has no broadcast.
    """
    x, n = _check(x, axis_name)
    if root not in range(n):
        raise UserError(f"broadcast: root={root} on {n} ranks; expected a rank of 0 to {n - 1}")
    return run("broadcast", algorithm, x, axis_name, get_op("sum"), {"root": root, **options})


def _check(x: Any, axis_name: str) -> tuple[jax.Array, int]:
    """The array, and the number of ranks on the axis."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic | int | float):
        raise UserError(
            f"a value of type {type(x).__name__} was given; expected one array: apply the "
            "collective to every leaf of a tree with jax.tree.map"
        )
    dtype = jnp.result_type(x) if isinstance(x, jax.Array | int | float) else x.dtype
    if not jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer):
        raise UserError(
            f"dtype {dtype} cannot be reduced; expected floating point or integers: cast it"
        )
    try:
        n = lax.axis_size(axis_name)
    except (NameError, TypeError) as error:  # TypeError: not hashable
        raise UserError(
            f"axis {axis_name!r} is not there; expected the name of a mesh axis, inside of "
            "shard_map: see jaxdp.on_mesh"
        ) from error
    return jnp.asarray(x), n

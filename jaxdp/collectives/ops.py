"""The reductions: how two values combine, and what combines with nothing.

There is no mean: it is a sum and one division, which the train step does once, by the global
weight.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp.errors import UserError


class Op(NamedTuple):
    """An associative, commutative reduction.

    Attributes:
      combine: two arrays -> one, elementwise, in JAX.
      numpy: the same in NumPy, a ufunc.
      identity: dtype -> the value that changes nothing; it fills padding.
    """

    combine: Callable[[Any, Any], Any]
    numpy: np.ufunc
    identity: Callable[[Any], Any]


def _lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype):
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


OPS: dict[str, Op] = {
    "sum": Op(jnp.add, np.add, lambda dtype: 0),
    "product": Op(jnp.multiply, np.multiply, lambda dtype: 1),
    "max": Op(jnp.maximum, np.maximum, _lowest),
    "min": Op(jnp.minimum, np.minimum, _highest),
}


def get_op(name: str) -> Op:
    """The reduction called `name`.

    Raises:
      UserError: there is none of that name.
    """
    if name not in OPS:
        hint = " (a mean is a sum and one division)" if name == "mean" else ""
        raise UserError(f"op {name!r} is not known{hint}; expected one of {', '.join(OPS)}")
    return OPS[name]

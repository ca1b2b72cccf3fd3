"""What stands between a user's loss and the step: its form is checked while it is traced."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxdp.columns import taken
from jaxdp.errors import UserError
from jaxdp.mesh import AXIS
from jaxdp.plan import Plan, Planned
from jaxdp.trees import named_leaves
from jaxdp.types import Batch, LossFn, LossOut, PyTree

# axis_index reads the rank and moves nothing
_COLLECTIVES = (
    "psum",
    "pmax",
    "pmin",
    "ppermute",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "pbroadcast",
    "ragged_all_to_all",
)


# jitted under this prefix, a function of ours whose gradient is known to be right
_ALLOWED = "jaxdp_loss_path_"

_LOOPS = ("scan", "while")


def checked_loss(loss_fn: LossFn, compute_dtype: Any = None, *, alone: bool = False) -> LossFn:
    """`loss_fn` with its result as a `LossOut` and its parameters in the compute dtype.

    Args:
      alone: also refuse the functions that are `allowed_in_loss`: for steps in which the devices'
        parameters differ while the loss is computed.

    Raises (while traced):
      UserError: the result is not (sum, weight), a sum is not a scalar, or the loss communicates.
    """

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def loss(params: PyTree, model_state: PyTree, batch: Batch, keys: Any) -> LossOut:
        if compute_dtype is not None:
            params = jax.tree.map(cast, params)
        refuse_collectives(loss_fn, params, model_state, batch, keys)
        if alone:
            _refuse_allowed(loss_fn, params, model_state, batch, keys)
        return _as_loss_out(loss_fn(params, model_state, batch, keys), model_state)

    return loss


def _as_loss_out(result: Any, model_state: PyTree) -> LossOut:
    if isinstance(result, LossOut):
        out = result if result.model_state is not None else result._replace(model_state=model_state)
    elif isinstance(result, tuple) and len(result) == 2:
        out = LossOut(*result, model_state=model_state)
    else:
        raise UserError(
            f"the loss returned a {type(result).__name__}; expected LossOut or (sum, weight): the "
            "sum over the batch and how many examples it holds, not a mean"
        )
    if reserved := sorted(filter(taken, out.metrics)):
        raise UserError(
            f"the loss returned metrics named {', '.join(reserved)}; expected other names than "
            "those that the step and the log report themselves"
        )
    for name, values in {"loss": (out.sum, out.weight), **out.metrics}.items():
        if not isinstance(values, tuple | list) or [jnp.shape(x) for x in values] != [(), ()]:
            given = jax.tree.map(jnp.shape, values)
            raise UserError(
                f"the loss returned {name} with shape {given}; expected a pair of scalars, "
                "(sum, weight)"
            )
    return out


def refuse_collectives(loss_fn: LossFn, *args: Any) -> None:
    """Raises if `loss_fn` communicates.

    A collective that is differentiated under `check_vma=False` gives a gradient that is silently
    the device's own (JAX_FACTS: `grad(pmean(loss))`); found in the jaxpr, whatever hides it there.

    Raises:
      UserError: naming the collective.
    """
    for name in primitives(jax.make_jaxpr(loss_fn)(*args).jaxpr):
        if _collective(name) in _COLLECTIVES:
            raise UserError(
                f"the loss calls the collective {name}; expected the sum over this device's "
                "examples alone: return (sum, weight), the step reduces both over all devices"
            )


def without_collectives(loss_fn: LossFn) -> LossFn:
    """`loss_fn`, which must not communicate at all, not even by functions that are allowed to.

    Raises (while traced):
      UserError: naming the collective.
    """

    def alone(*args: Any) -> Any:
        # with an axis to speak of, a collective is found here and not at its missing axis
        jaxpr = jax.make_jaxpr(loss_fn, axis_env=[(AXIS, 2)])(*args).jaxpr
        for name in primitives(jaxpr, within_allowed=True):
            if _collective(name) in _COLLECTIVES:
                raise UserError(
                    f"the loss calls the collective {name}, as batch norm over all devices does; "
                    "expected none: logical shards are computed one by one, each by itself"
                )
        return loss_fn(*args)

    return alone


def _refuse_allowed(loss_fn: LossFn, *args: Any) -> None:
    if any(_reductions(jax.make_jaxpr(loss_fn)(*args).jaxpr)):
        raise UserError(
            "the loss sums over devices (batch norm of mode sync), but in local steps each device "
            "has parameters of its own; expected statistics of each device: model.batch_norm local"
        )


def allowed_in_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which may communicate inside a loss: it defines its own, right gradient."""

    def allowed(*args: Any) -> Any:
        return function(*args)

    allowed.__name__ = _ALLOWED + function.__name__
    return wraps(function)(jax.jit(allowed))


def primitives(jaxpr: Any, *, within_allowed: bool = False) -> Iterator[str]:
    """The names of a jaxpr's primitives at any depth, by default but for allowed functions."""
    for eqn in jaxpr.eqns:
        if _is_allowed(eqn) and not within_allowed:
            continue
        yield eqn.primitive.name
        for inner in inner_jaxprs(eqn):
            yield from primitives(inner, within_allowed=within_allowed)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds: bodies of loops, branches, called functions."""
    for value in jax.tree.leaves(eqn.params, is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield getattr(value, "jaxpr", value)


def _collective(primitive: str) -> str:
    """The plain name of a primitive that may be a variant of a collective."""
    return primitive.rstrip("2").removesuffix("_invariant")


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)


def planned_statistics(jaxpr: Any, n: int) -> Plan:
    """The collectives of the functions that are `allowed_in_loss`.

    Args:
      jaxpr: of this device's sums, gradients included.
      n: number of devices.
    """
    found = list(_reductions(jaxpr, in_loop=False)) if n > 1 else []
    return Plan(
        tuple(
            Planned("batch statistics", "all-reduce", 1, size, 2 * (n - 1) * size // n, in_loop)
            for size, in_loop in found
        )
    )


def _reductions(
    jaxpr: Any, *, in_loop: bool = False, allowed: bool = False
) -> Iterator[tuple[int, bool]]:
    """(bytes, whether in a loop) of each sum over devices in allowed functions, at any depth."""
    for eqn in jaxpr.eqns:
        if allowed and _collective(eqn.primitive.name) == "psum":
            yield sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars), in_loop
        loop, known = eqn.primitive.name in _LOOPS, _is_allowed(eqn)
        for inner in inner_jaxprs(eqn):
            yield from _reductions(inner, in_loop=in_loop or loop, allowed=allowed or known)


def _is_allowed(eqn: Any) -> bool:
    return str(eqn.params.get("name", "")).startswith(_ALLOWED)


def refuse_integers(what: str, tree: PyTree) -> None:
    """Raises UserError if a leaf is not floating: it cannot be averaged over devices."""
    for name, leaf in named_leaves(tree):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise UserError(
                f"{what} {name}: dtype {jnp.result_type(leaf)}; expected floating point: counters "
                "and keys belong to the batch, or are read from the step's number"
            )

"""What every step builder does around the update: the state's counters, and one decision by all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UserError
from jaxdp.gradients import as_before
from jaxdp.loss_scale import DynamicScale, adjusted, overflowed
from jaxdp.mesh import AXIS, place, replicate
from jaxdp.state import TrainState
from jaxdp.steps.types import Metrics
from jaxdp.types import PyTree


def blank_state(mesh: Mesh, scaling: DynamicScale | None = None, **parts: PyTree) -> TrainState:
    """A state at step 0 with these parts, whole on every device; `sync_state` one slot each."""
    zero = np.zeros((), np.int32)
    counters = dict.fromkeys(("step", "skipped", "nonfinite", "nonfinite_run"), zero)
    scale = () if scaling is None else scaling.init()
    sync_state = stacked(mesh, parts.pop("sync_state", ()))
    whole = TrainState(**counters, **parts, sync_state=(), loss_scale=scale)
    return replicate(mesh, whole)._replace(sync_state=sync_state)


def stacked(mesh: Mesh, tree: PyTree) -> PyTree:
    """One device's slots as every device's: leaves get a leading dim of devices, sharded."""
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (mesh.size, *jnp.shape(x))), tree)
    return place(copies, NamedSharding(mesh, P(AXIS)))


def slot(tree: PyTree) -> PyTree:
    """This device's part of a `stacked` tree, inside `shard_map`."""
    return jax.tree.map(lambda x: x[0], tree)


def unslot(tree: PyTree) -> PyTree:
    """The inverse of `slot`."""
    return jax.tree.map(lambda x: x[None], tree)


def settled(
    state: TrainState,
    new: TrainState,
    metrics: Metrics,
    norm: jax.Array,
    scaling: DynamicScale | None = None,
    learning_rate: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[TrainState, Metrics]:
    """The state after a step: `new` if the step counts, else `state`; the counters either way.

    Args:
      state, new: before the step, and with its update applied; the model state reduced, and so as
        equal on all devices as the metrics.
      metrics: reduced means, "loss" and "weight" among them.
      norm: float scalar, of the reduced gradient.
      scaling: of float16.
      learning_rate: step -> rate, only to be shown.
    """
    # one decision, from reduced values: the same on every device
    empty = metrics["weight"] == 0
    sound = _all_finite(new.model_state)  # statistics can overflow where the loss does not
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"]) & (metrics["weight"] >= 0) & sound
    overflow = overflowed(state.loss_scale, metrics["loss"], norm) & sound
    chosen = partial(jnp.where, finite & ~empty)
    new = jax.tree.map(chosen, as_before(new, state), state)
    new = new._replace(
        step=state.step + 1,
        skipped=state.skipped + (finite & empty),
        nonfinite=state.nonfinite + ~(finite | overflow),
        nonfinite_run=jnp.where(finite | overflow, 0, state.nonfinite_run + 1),
        loss_scale=adjusted(state.loss_scale, scaling, finite & ~empty, overflow),
    )
    shown: dict[str, Any] = {**metrics, "grad_norm": norm}
    shown |= {name: getattr(new, name) for name in ("skipped", "nonfinite", "nonfinite_run")}
    if new.loss_scale:
        shown["loss_scale"] = new.loss_scale.scale
        shown["overflows"] = new.loss_scale.overflows
    if learning_rate is not None:
        shown["learning_rate"] = learning_rate(state.step)
    return new, {name: jnp.float32(value) for name, value in shown.items()}


def _all_finite(tree: PyTree) -> jax.Array | bool:
    """Whether every number of every leaf is finite; True of no leaf."""
    leaves = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all() if leaves else True


def loss_scaling(compute_dtype: Any, loss_scale: DynamicScale | None) -> DynamicScale | None:
    """How the loss is scaled in a compute dtype; None where it is not.

    Raises:
      UserError: `loss_scale` would have no effect.
    """
    if compute_dtype is not None and jnp.dtype(compute_dtype) == jnp.float16:
        return loss_scale or DynamicScale()
    if loss_scale is not None:
        raise UserError(
            f"loss_scale: {loss_scale} has no effect with compute_dtype {compute_dtype}; expected "
            "float16, or no loss_scale"
        )
    return None


def checked_optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """An optimizer that may be given the number of the step.

    Raises:
      UserError: it has no `init` and `update`.
    """
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise UserError(
            f"optimizer: {optimizer!r}; expected an optax transformation, such as optax.adam(1e-3)"
        )
    return optax.with_extra_args_support(optimizer)


def check_options(microbatches: int, clip_norm: float | None, seed: int) -> None:
    """Raises UserError for options that no step builder takes."""
    rules = {
        f"microbatches: {microbatches}; expected a whole number of at least 1": (
            not isinstance(microbatches, int) or microbatches < 1
        ),
        f"clip_norm: {clip_norm}; expected a number above 0, or None": (
            clip_norm is not None and not clip_norm > 0
        ),
        f"seed: {seed}; expected 0 to {2**32 - 1}": not 0 <= seed < 2**32,
    }
    if broken := [line for line, is_broken in rules.items() if is_broken]:
        raise UserError(*broken)

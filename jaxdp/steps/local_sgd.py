"""Local SGD and DiLoCo: many optimizer steps on each device between two reductions.

One step of the trainer, an *outer* step, consumes one global batch.  From equal parameters p each
device makes H *inner* steps on its own part of it, without communication, and arrives at p_i.  What
they moved is reduced once and averaged, and an outer optimizer takes it for a gradient:

    d = sum_i w_i (p - p_i) / sum_i w_i         p, outer state = outer_optimizer(d, p, outer state)

An outer SGD of rate 1 without momentum makes p the mean of all p_i (local SGD); Nesterov momentum
of 0.9 and a rate of 0.7 is DiLoCo.

w_i is the weight of the examples that device i saw.  A device without any has p_i = p and counts
for nothing; and with one inner step of SGD, d is the rate times the gradient of the global batch,
however unequal the weights: the data-parallel step.

References: S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019;
H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017 (the weights); A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of
Language Models", 2023, arXiv 2311.08105.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UserError
from jaxdp.freeze import combine, nothing
from jaxdp.gradients import accumulated, as_before, clip, global_means, weighted, widened
from jaxdp.loss_path import checked_loss
from jaxdp.loss_scale import DynamicScale, unscaled
from jaxdp.mesh import AXIS, on_mesh
from jaxdp.plan import Plan
from jaxdp.state import AS_IT_IS, TrainState
from jaxdp.steps.outcome import (
    blank_state,
    check_options,
    checked_optimizer,
    loss_scaling,
    settled,
    slot,
    unslot,
)
from jaxdp.steps.problem import Problem
from jaxdp.steps.types import Metrics, TrainStep
from jaxdp.sync import GradSync, Sums
from jaxdp.types import Batch, LossFn, PyTree


class LocalState(NamedTuple):
    """One device's slot of `TrainState.sync_state`.

    Attributes:
      inner: the state of its inner optimizer.
      sync: the state of the synchronisation.
    """

    inner: PyTree
    sync: PyTree


class _Replica(NamedTuple):
    """What a device changes by itself during its inner steps."""

    params: PyTree
    model_state: PyTree
    opt_state: PyTree


# (replica, (number of its first part in the batch, leaves `[microbatches, b, ...]`)) -> (replica,
# sums of the loss and the metrics)
_InnerStep = Callable[[_Replica, tuple[jax.Array, Batch]], tuple[_Replica, PyTree]]


def make_local_sgd_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    sync: GradSync,
    mesh: Mesh,
    *,
    local_steps: int,
    outer_optimizer: optax.GradientTransformation | None = None,
    microbatches: int = 1,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    seed: int = 0,
    learning_rate: Callable[[jax.Array], jax.Array] | None = None,
    loss_scale: DynamicScale | None = None,
    frozen: Callable[[PyTree], PyTree] = nothing,
) -> TrainStep:
    """Builds the outer step for all devices of `mesh`.

    The step's `parts` are local_steps x microbatches, cut from the global batch in this order.
    `opt_state` is the outer optimizer's state, equal on all devices; the inner ones are in
    `sync_state`, each device's own from step to step, as in DiLoCo.

    An inner step whose examples have no weight updates nothing.  A loss, an inner gradient or a
    result that is not finite, on any device, undoes the whole outer step on all.

    Metrics are means over all inner steps and devices, each loss taken where its device then was;
    grad_norm is the norm of d, what the outer optimizer gets, and inner_grad_norm the mean of the
    inner gradients' norms before clipping.

    Args:
      loss_fn: as for `make_train_step`, but batch norm over devices is refused: in between their
        parameters differ.  `model_state` is each device's own during the inner steps, and averaged
        by w_i after them.
      optimizer: of the inner steps; if it takes the keyword `step`, it gets the int32 number of the
        outer step: schedules count these.
      sync: how w_i (p - p_i) is summed over devices.
      mesh: one axis, `jaxdp.mesh.AXIS`.
      local_steps: H, inner steps in an outer one.
      outer_optimizer: any optax transformation, called without `step`; see `outer_sgd`.  None: a
        rate of 1 without momentum.
      microbatches: in how many parts a device computes the gradient of an inner step.
      clip_norm: the global norm to which the gradient of each inner step is clipped, on each device
        by itself.
      compute_dtype, seed, learning_rate, loss_scale, frozen: as for `make_train_step`;
        learning_rate is the inner one.

    Returns:
      A `TrainStep`.

    Raises:
      UserError: `local_steps` or an option of `make_train_step` is out of range, or `sync` is not
        a `GradSync`.
    """
    check_options(microbatches, clip_norm, seed)
    _check(local_steps, sync)
    scaling = loss_scaling(compute_dtype, loss_scale)
    optimizer = checked_optimizer(optimizer)
    outer = outer_sgd(1.0, 0.0) if outer_optimizer is None else outer_optimizer
    problem = Problem(checked_loss(loss_fn, compute_dtype, alone=True), frozen, seed)

    def device_sums(state: TrainState, batch: Batch) -> tuple[Sums, PyTree]:
        loss, trained, key = problem.at(state)
        batch = jax.tree.map(lambda x: x.reshape(local_steps, microbatches, *x.shape[1:]), batch)
        step = _inner_step(loss, optimizer, clip_norm, key, state)
        start = _Replica(trained, state.model_state, slot(state.sync_state).inner)
        return _local_training(step, start, batch)

    def body(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sums, inner = device_sums(state, batch)
        sums, sync_state = sync.update(sums, slot(state.sync_state).sync, AXIS)
        moved, model_state, metrics = global_means(sums)
        # an inner step that was left out is seen here, by all devices alike
        norm = jnp.where(jnp.isfinite(metrics["inner_grad_norm"]), optax.tree.norm(moved), jnp.nan)
        trained, fixed = problem.split(state.params)
        updates, opt_state = outer.update(moved, state.opt_state, trained)
        new = state._replace(
            params=combine(optax.apply_updates(trained, updates), fixed),
            model_state=model_state,
            opt_state=opt_state,
            sync_state=unslot(LocalState(inner, sync_state)),
        )
        return settled(state, new, metrics, norm, scaling, learning_rate)

    state_specs = TrainState(*[P()] * len(TrainState._fields))._replace(sync_state=P(AXIS))
    in_specs = (state_specs, P(None, AXIS))
    run = jax.jit(
        on_mesh(body, mesh, in_specs, (state_specs, P())),
        donate_argnums=0,
        compiler_options=dict(sync.compiler_options(mesh.devices.flat[0].platform)),
    )

    def first_state(params: PyTree, model_state: PyTree) -> TrainState:
        trained = problem.trained(params)
        return blank_state(
            mesh,
            scaling,
            params=params,
            model_state=model_state,
            opt_state=outer.init(trained),
            sync_state=LocalState(optimizer.init(trained), sync.init(trained)),
        )

    def planned(state: TrainState, batch: Batch) -> Plan | None:
        if sync.plan is None:
            return None
        reduced = on_mesh(lambda *args: device_sums(*args)[0], mesh, in_specs, P())
        return sync.plan(jax.eval_shape(reduced, state, batch), mesh.size)

    def respread_both(state: LocalState, n: int) -> LocalState:
        return LocalState(respread(state.inner, n), (sync.respread or respread)(state.sync, n))

    form = AS_IT_IS._replace(respread=respread_both)
    return TrainStep(run, mesh, local_steps * microbatches, first_state, planned, form)


def outer_sgd(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    """SGD with Nesterov momentum, or without any: the outer optimizer of DiLoCo."""
    return optax.sgd(learning_rate, momentum or None, nesterov=bool(momentum))


def respread(stacked: PyTree, n: int) -> PyTree:
    """Inner optimizers' states for another number of devices: their mean, for every new one.

    Args:
      stacked: leaves `[devices, ...]`, of a `TrainState.sync_state`; moments and the like are
        averaged, counts (integers) take the largest.
      n: the new number of devices.

    Returns:
      NumPy arrays `[n, ...]`.
    """

    def of_leaf(x: Any) -> np.ndarray:
        x = np.asarray(x)
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        one = x.mean(0, dtype=np.float64).astype(x.dtype) if floating else x.max(0)
        return np.broadcast_to(one, (n, *one.shape))

    return jax.tree.map(of_leaf, stacked)


def _inner_step(
    loss: LossFn,
    optimizer: optax.GradientTransformationExtraArgs,
    clip_norm: float | None,
    key: jax.Array,
    state: TrainState,
) -> _InnerStep:
    """A device's step by itself, within the outer step that starts at `state`."""

    def step(start: _Replica, part: tuple[jax.Array, Batch]) -> tuple[_Replica, PyTree]:
        first_part, batch = part
        rank, n = lax.axis_index(AXIS), lax.axis_size(AXIS)
        sums, model_state = accumulated(
            loss, start.params, start.model_state, batch, key, rank, n, first_part
        )
        sums = unscaled(sums, state.loss_scale)
        # over the examples of this device alone
        grads, _, means = global_means(sums | {"model_state": ()})
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads = clip(grads, norm, clip_norm)
        updates, opt_state = optimizer.update(grads, start.opt_state, start.params, step=state.step)
        end = _Replica(optax.apply_updates(start.params, updates), model_state, opt_state)
        return _unless_spoilt(start, end, sums["scalars"], means["weight"], norm)

    return step


def _local_training(step: _InnerStep, start: _Replica, batch: Batch) -> tuple[Sums, PyTree]:
    """This device's inner steps, of `batch` with leaves `[H, microbatches, b, ...]`.

    Returns:
      (what is to be summed over devices, the inner optimizer's state).
    """
    local_steps, microbatches = jax.tree.leaves(batch)[0].shape[:2]
    first_parts = jnp.arange(local_steps) * microbatches
    end, scalars = lax.scan(step, start, (first_parts, batch))
    scalars = jax.tree.map(lambda x: x.sum(0), scalars)
    weight = scalars["loss"][1]
    moved = jax.tree.map(jnp.subtract, widened(start.params), widened(end.params))
    sums = {
        "grads": weighted(moved, weight),
        "scalars": scalars,
        "model_state": weighted(end.model_state, weight),
    }
    return sums, end.opt_state


def _unless_spoilt(
    start: _Replica, end: _Replica, scalars: PyTree, weight: jax.Array, norm: jax.Array
) -> tuple[_Replica, PyTree]:
    """The replica after an inner step, and its sums: left out where there is nothing to learn from.

    The step that is not finite is left out, too, so that later losses stay finite and the reason
    of the fault can be told (float16: an overflow); its norm makes all undo the outer step.
    """
    norm = jnp.where(weight >= 0, norm, jnp.nan)
    counts = (weight > 0) & jnp.isfinite(norm)
    kept = jax.tree.map(partial(jnp.where, counts), as_before(end, start), start)
    dtype = scalars["loss"].dtype
    return kept, scalars | {"inner_grad_norm": jnp.stack([weight * norm, weight]).astype(dtype)}


def _check(local_steps: int, sync: Any) -> None:
    if not isinstance(sync, GradSync):
        raise UserError(
            f"sync: {type(sync).__name__}; expected a GradSync such as all_reduce_sync(): the "
            "inner optimizers have no shares"
        )
    if not isinstance(local_steps, int) or local_steps < 1:
        raise UserError(f"local_steps: {local_steps}; expected a whole number of at least 1")

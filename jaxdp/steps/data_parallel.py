"""The data-parallel training step.

Every device computes gradients of its part of the global batch, microbatch by microbatch; sums of
gradients, losses and weights are reduced over all devices once; every device divides by the global
weight and applies the same update to the same parameters.

Reference: J. Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012; S. Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UserError
from jaxdp.freeze import combine, nothing
from jaxdp.gradients import local_sums
from jaxdp.loss_path import checked_loss, planned_statistics
from jaxdp.loss_scale import DynamicScale, unscaled
from jaxdp.mesh import AXIS, on_mesh, overlaps
from jaxdp.plan import Plan
from jaxdp.state import TrainState
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
from jaxdp.steps.updates import Update, replicated_update
from jaxdp.steps.zero import sharded_update
from jaxdp.sync import GradSync, ShardedSync, Sums, ready_order
from jaxdp.types import Batch, LossFn, PyTree


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    sync: GradSync | ShardedSync,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    seed: int = 0,
    learning_rate: Callable[[jax.Array], jax.Array] | None = None,
    loss_scale: DynamicScale | None = None,
    frozen: Callable[[PyTree], PyTree] = nothing,
    peel_last: bool | None = None,
) -> TrainStep:
    """Builds the training step for all devices of `mesh`.

    Args:
      loss_fn: (params, model_state, batch, keys) -> `LossOut`, or a plain (sum, weight); sees
        `[b, ...]`, one device's part of one microbatch, and one random key per example.
      optimizer: any optax transformation; if it takes the keyword `step`, it gets the int32 number
        of the step.
      sync: how gradients are summed over devices; a `sharded_sync`: each device then keeps and
        updates its share of the optimizer's state alone (ZeRO-1).
      mesh: one axis, `jaxdp.mesh.AXIS`.
      microbatches: how many parts of the batch are computed one after the other.
      clip_norm: the global norm to which the reduced gradient is clipped.
      compute_dtype: the dtype to which floating parameters are cast for the loss; gradients and
        parameters themselves keep theirs (sums are of float32 at least).  float16 needs, and gets,
        a dynamic loss scale.
      seed: of all randomness in training.
      learning_rate: step -> learning rate, only to be shown among the metrics.
      loss_scale: how the scale of float16 behaves; `DynamicScale()` by default.
      frozen: params -> tree of bool, which leaves are not trained; from `jaxdp.freeze.freeze`.
      peel_last: whether the last microbatch is computed behind the loop over the others, so that
        the reduction of the first buckets may overlap with its backward pass; None: where there are
        buckets, and the platform overlaps.  The same sums; the loss is compiled twice.

    Returns:
      A `TrainStep`.

    Raises:
      UserError: `microbatches`, `clip_norm` or `seed` is out of range, `sync` is no
        synchronisation, or `loss_scale` or `peel_last` would have no effect.
    """
    check_options(microbatches, clip_norm, seed)
    if peel_last and microbatches == 1:
        raise UserError("peel_last: True has no effect with microbatches 1; expected 2 or more")
    scaling = loss_scaling(compute_dtype, loss_scale)
    problem = Problem(checked_loss(loss_fn, compute_dtype), frozen, seed)
    update = _make_update(optimizer, sync, clip_norm, problem.trained)
    platform = mesh.devices.flat[0].platform
    if peel_last is None:
        peel_last = microbatches > 1 and update.takes_order and overlaps(platform)

    def device_sums(state: TrainState, batch: Batch) -> Sums:
        loss, trained, key = problem.at(state)
        sums = local_sums(loss, trained, state.model_state, batch, key, AXIS, peel_last)
        return unscaled(sums, state.loss_scale)

    def body(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        trained, fixed = problem.split(state.params)
        sums = device_sums(state, batch)
        options = {}
        if update.takes_order:
            options["order"] = ready_order(jax.make_jaxpr(device_sums)(state, batch).jaxpr)
        new = update.apply(
            sums, trained, state.opt_state, slot(state.sync_state), state.step, **options
        )
        after = state._replace(
            params=combine(new.params, fixed),
            model_state=new.model_state,
            opt_state=new.opt_state,
            sync_state=unslot(new.sync_state),
        )
        return settled(state, after, new.metrics, new.norm, scaling, learning_rate)

    def specs(state: TrainState) -> TrainState:
        everywhere = TrainState(*[P()] * len(TrainState._fields))
        return everywhere._replace(opt_state=update.specs(state.opt_state), sync_state=P(AXIS))

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        spread = specs(state)
        return on_mesh(body, mesh, (spread, P(None, AXIS)), (spread, P()))(state, batch)

    def first_state(params: PyTree, model_state: PyTree) -> TrainState:
        trained = problem.trained(params)
        opt_state = update.init(mesh, trained)
        return blank_state(
            mesh,
            scaling,
            params=params,
            model_state=model_state,
            opt_state=(),
            sync_state=update.sync_init(trained),
        )._replace(opt_state=opt_state)

    def planned(state: TrainState, batch: Batch) -> Plan | None:
        if update.plan is None:
            return None
        sums = on_mesh(device_sums, mesh, (specs(state), P(None, AXIS)), P())
        jaxpr, shapes = jax.make_jaxpr(sums, return_shape=True)(state, batch)
        options = {"order": ready_order(jaxpr.jaxpr)} if update.takes_order else {}
        plan = update.plan(shapes, problem.trained(state.params), mesh.size, **options)
        return plan + planned_statistics(jaxpr.jaxpr, mesh.size)

    options = dict(update.compiler_options(platform))
    jitted = jax.jit(run, donate_argnums=0, compiler_options=options)
    return TrainStep(
        jitted, mesh, microbatches, first_state, planned, update.form, peeled=peel_last
    )


def _make_update(
    optimizer: optax.GradientTransformation,
    sync: GradSync | ShardedSync,
    clip_norm: float | None,
    trained: Callable[[PyTree], PyTree],
) -> Update:
    optimizer = checked_optimizer(optimizer)
    if not isinstance(sync, GradSync | ShardedSync):
        raise UserError(
            f"sync: {sync!r}; expected a GradSync or a ShardedSync, such as "
            "jaxdp.all_reduce_sync('ring')"
        )
    if isinstance(sync, ShardedSync):
        return sharded_update(optimizer, sync, AXIS, clip_norm, trained)
    return replicated_update(optimizer, sync, AXIS, clip_norm)

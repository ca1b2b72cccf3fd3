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

from jaxdp.gradients import clip, global_means, local_sums
from jaxdp.loss_path import checked_loss, planned_statistics
from jaxdp.loss_scale import DynamicScale, scaled, unscaled
from jaxdp.mesh import AXIS, on_mesh
from jaxdp.plan import Plan
from jaxdp.state import TrainState
from jaxdp.steps.outcome import (
    blank_state,
    check_options,
    loss_scaling,
    settled,
    slot,
    unslot,
)
from jaxdp.steps.types import Metrics, TrainStep
from jaxdp.sync import GradSync, Sums
from jaxdp.types import Batch, LossFn, PyTree


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    sync: GradSync,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    seed: int = 0,
    learning_rate: Callable[[jax.Array], jax.Array] | None = None,
    loss_scale: DynamicScale | None = None,
) -> TrainStep:
    """Builds the training step for all devices of `mesh`.

    Args:
      loss_fn: (params, model_state, batch, keys) -> `LossOut`, or a plain (sum, weight); sees
        `[b, ...]`, one device's part of one microbatch, and one random key per example.
      optimizer: any optax transformation; if it takes the keyword `step`, it gets the int32 number
        of the step.
      sync: how gradients are summed over devices.
      mesh: one axis, `jaxdp.mesh.AXIS`.
      microbatches: how many parts of the batch are computed one after the other.
      clip_norm: the global norm to which the reduced gradient is clipped.
      compute_dtype: the dtype to which floating parameters are cast for the loss; gradients and
        parameters themselves keep theirs.  float16 needs, and gets, a dynamic loss scale.
      seed: of all randomness in training.
      learning_rate: step -> learning rate, only to be shown among the metrics.
      loss_scale: how the scale of float16 behaves; `DynamicScale()` by default.

    Returns:
      A `TrainStep`.

    Raises:
      UserError: `microbatches`, `clip_norm` or `seed` is out of range, or `loss_scale` would have
        no effect.
    """
    check_options(microbatches, clip_norm, seed)
    scaling = loss_scaling(compute_dtype, loss_scale)
    optimizer = optax.with_extra_args_support(optimizer)
    true_loss = checked_loss(loss_fn, compute_dtype)

    def device_sums(state: TrainState, batch: Batch) -> Sums:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)
        loss = scaled(true_loss, state.loss_scale)
        sums = local_sums(loss, state.params, state.model_state, batch, key, AXIS)
        return unscaled(sums, state.loss_scale)

    def body(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sums, sync_state = sync.update(device_sums(state, batch), slot(state.sync_state), AXIS)
        grads, model_state, metrics = global_means(sums)
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads = clip(grads, norm, clip_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, step=state.step)
        new = state._replace(
            params=optax.apply_updates(state.params, updates),
            model_state=model_state,
            opt_state=opt_state,
            sync_state=unslot(sync_state),
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
        return blank_state(
            mesh,
            scaling,
            params=params,
            model_state=model_state,
            opt_state=optimizer.init(params),
            sync_state=sync.init(params),
        )

    def planned(state: TrainState, batch: Batch) -> Plan | None:
        if sync.plan is None:
            return None
        trace = jax.make_jaxpr(on_mesh(device_sums, mesh, in_specs, P()), return_shape=True)
        jaxpr, sums = trace(state, batch)
        return sync.plan(sums, mesh.size) + planned_statistics(jaxpr.jaxpr, mesh.size)

    return TrainStep(run, mesh, microbatches, first_state, planned, sync.respread)

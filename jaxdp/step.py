"""The data-parallel training step.

Every device computes gradients of its part of the global batch, microbatch by microbatch; sums of
gradients, losses and weights are reduced over all devices once; every device divides by the global
weight and applies the same update to the same parameters.

Reference: J. Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012; S. Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UserError
from jaxdp.gradients import clip, global_means, local_sums
from jaxdp.loss_path import checked_loss, planned_statistics, refuse_integers
from jaxdp.loss_scale import DynamicScale, adjusted, overflowed, scaled, unscaled
from jaxdp.mesh import AXIS, on_mesh, replicate
from jaxdp.plan import Plan
from jaxdp.state import TrainState
from jaxdp.sync import GradSync, Sums
from jaxdp.types import Batch, LossFn, PyTree

Metrics = Mapping[str, jax.Array]


@dataclass(frozen=True)
class TrainStep:
    """A compiled step: `state, metrics = step(state, step.place(batch))`.

    `state` is donated: the arrays that were passed in are gone afterwards.
    """

    run: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]  # a jitted function
    mesh: Mesh
    microbatches: int
    optimizer: optax.GradientTransformationExtraArgs
    sync: GradSync
    sums: Callable[[TrainState, Batch], PyTree]  # what the synchronisation gets, for its shapes
    loss_scale: DynamicScale | None = None  # of float16

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step.

        Args:
          state: from `init`, or from the step before.
          batch: from `place`: leaves `[microbatches, devices * b, ...]`.

        Returns:
          The new state, and float32 scalars: loss, weight, grad_norm (of the reduced gradient,
          before clipping), skipped and nonfinite (steps without an update so far), nonfinite_run
          (of the latter, in a row up to this one), and the loss's own metrics.  In float16, too:
          loss_scale (the next step's) and overflows (steps without an update, so far).
        """
        return self.run(state, batch)

    def init(self, params: PyTree, model_state: PyTree = None) -> TrainState:
        """The state before step 0, on every device.

        Args:
          params: floating arrays; copied, so that donating the state leaves the caller's alone.
          model_state: floating arrays, averaged over devices by weight after every step; None
            where the model has none.

        Raises:
          UserError: a leaf is not floating.
        """
        refuse_integers("params", params)
        refuse_integers("model_state", model_state)
        zero = np.zeros((), np.int32)
        params = jax.tree.map(jnp.array, params)
        state = TrainState(
            step=zero,
            skipped=zero,
            nonfinite=zero,
            nonfinite_run=zero,
            params=params,
            model_state={} if model_state is None else model_state,
            opt_state=self.optimizer.init(params),
            sync_state=(),
            loss_scale=() if self.loss_scale is None else self.loss_scale.init(),
        )
        sync_state = jax.device_put(self.sync.init(params), NamedSharding(self.mesh, P(AXIS)))
        return replicate(self.mesh, state)._replace(sync_state=sync_state)

    def plan(self, state: TrainState, batch: Batch) -> Plan | None:
        """The collectives of the compiled step; None if the synchronisation does not state them.

        Args:
          state, batch: as `run` gets them, or only their shapes and dtypes.
        """
        if self.sync.plan is None:
            return None
        given = jax.tree.map(_shape, (state, batch))
        jaxpr, sums = jax.make_jaxpr(self.sums, return_shape=True)(*given)
        statistics = planned_statistics(jaxpr.jaxpr, self.mesh.size)
        return self.sync.plan(sums, self.mesh.size) + statistics

    def place(self, batch: Batch) -> Batch:
        """Puts a global batch from the host on the devices.

        Microbatch m holds examples m * B / M to (m + 1) * B / M whatever the number of devices.

        Args:
          batch: NumPy arrays `[B, ...]`.

        Raises:
          UserError: microbatches x devices does not divide B, or arrays differ in length.
        """
        lengths = {name: len(x) if np.ndim(x) else 0 for name, x in batch.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(f"batch: arrays of lengths {lengths}; expected one length for all")
        return jax.device_put(
            {name: self._cut(name, x) for name, x in batch.items()},
            NamedSharding(self.mesh, P(None, AXIS)),
        )

    def _cut(self, name: str, x: np.ndarray) -> np.ndarray:
        parts = self.microbatches * self.mesh.size
        if x.ndim == 0 or x.shape[0] % parts or not x.shape[0]:
            raise UserError(
                f"batch[{name!r}]: shape {x.shape}; expected a first dimension divisible by "
                f"{parts} ({self.microbatches} microbatches x {self.mesh.size} devices)"
            )
        return x.reshape(self.microbatches, -1, *x.shape[1:])


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
    _check_options(microbatches, clip_norm, seed)
    scaling = _scaling(compute_dtype, loss_scale)
    optimizer = optax.with_extra_args_support(optimizer)
    true_loss = checked_loss(loss_fn, compute_dtype)

    def device_sums(state: TrainState, batch: Batch) -> Sums:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)
        loss = scaled(true_loss, state.loss_scale)
        sums = local_sums(loss, state.params, state.model_state, batch, key, AXIS)
        return unscaled(sums, state.loss_scale)

    def body(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sums, sync_state = sync.update(device_sums(state, batch), state.sync_state, AXIS)
        grads, model_state, metrics = global_means(sums)
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads = clip(grads, norm, clip_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, step=state.step)
        new = state._replace(
            params=optax.apply_updates(state.params, updates),
            model_state={} if model_state is None else model_state,
            opt_state=opt_state,
            sync_state=sync_state,
        )
        # one decision, from reduced values: the same on every device
        empty = metrics["weight"] == 0
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"]) & (metrics["weight"] >= 0)
        overflow = overflowed(state.loss_scale, metrics["loss"], norm)
        new = jax.tree.map(lambda a, b: jnp.where(finite & ~empty, a, b), new, state)
        new = new._replace(
            step=state.step + 1,
            skipped=state.skipped + (finite & empty),
            nonfinite=state.nonfinite + ~(finite | overflow),
            nonfinite_run=jnp.where(finite | overflow, 0, state.nonfinite_run + 1),
            loss_scale=adjusted(state.loss_scale, scaling, finite & ~empty, overflow),
        )
        metrics |= {"grad_norm": norm}
        metrics |= {name: getattr(new, name) for name in ("skipped", "nonfinite", "nonfinite_run")}
        if new.loss_scale:
            metrics["loss_scale"] = new.loss_scale.scale
            metrics["overflows"] = new.loss_scale.overflows
        if learning_rate is not None:
            metrics["learning_rate"] = learning_rate(state.step)
        return new, {name: jnp.float32(value) for name, value in metrics.items()}

    state_specs = TrainState(*[P()] * len(TrainState._fields))._replace(sync_state=P(AXIS))
    in_specs = (state_specs, P(None, AXIS))
    run = jax.jit(
        on_mesh(body, mesh, in_specs, (state_specs, P())),
        donate_argnums=0,
        compiler_options=dict(sync.compiler_options(mesh.devices.flat[0].platform)),
    )
    sums = on_mesh(device_sums, mesh, in_specs, P())
    return TrainStep(run, mesh, microbatches, optimizer, sync, sums, scaling)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _scaling(compute_dtype: Any, loss_scale: DynamicScale | None) -> DynamicScale | None:
    if compute_dtype is not None and jnp.dtype(compute_dtype) == jnp.float16:
        return loss_scale or DynamicScale()
    if loss_scale is not None:
        raise UserError(
            f"loss_scale: {loss_scale} has no effect with compute_dtype {compute_dtype}; expected "
            "float16, or no loss_scale"
        )
    return None


def _check_options(microbatches: int, clip_norm: float | None, seed: int) -> None:
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

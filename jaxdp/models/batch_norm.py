"""Batch normalisation whose statistics may be those of the whole batch, on all devices.

    sync    statistics of the microbatch over all devices: the training of one device (law 1).  One
            small all-reduce per layer forward and one backward, in every microbatch.
    local   statistics of each device's own part, as in PyTorch without SyncBatchNorm: another
            algorithm, whose result depends on the number of devices.  No communication; the
            running averages are merged over devices, by weight, after every step.

Examples of weight 0 are outside the statistics; other weights do not matter to them.

References: Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing
Internal Covariate Shift", ICML 2015.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdp.loss_path import allowed_in_loss
from jaxdp.mesh import AXIS

Mode = Literal["sync", "local"]

_MOMENTUM = 0.9  # of the running averages, per microbatch
_EPSILON = 1e-5


class BatchNorm(nnx.Module):
    """(x - mean) / sqrt(variance + 1e-5) * scale + bias, over examples and positions.

    Args:
      features: the last dim of the inputs.
      mode: "sync" or "local", see the module.
    """

    def __init__(self, features: int, mode: Mode):
        self.scale = nnx.Param(jnp.ones(features, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(features, jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros(features, jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones(features, jnp.float32))
        self.mode: Mode = mode

    def __call__(self, x_BxD: jax.Array, weight_B: jax.Array | None, training: bool) -> jax.Array:
        """Normalises; in training by the batch's statistics, and updates the running averages.

        Args:
          x_BxD: `[b, ..., features]`.
          weight_B: which examples count (those above 0); None: all.
          training: otherwise the running averages are used and left alone.
        """
        b, features = x_BxD.shape[0], x_BxD.shape[-1]
        x_BxPxD = x_BxD.reshape(b, -1, features)
        wide = jnp.promote_types(x_BxD.dtype, jnp.float32)
        mean_D, variance_D = self.mean[...].astype(wide), self.variance[...].astype(wide)
        if training:
            used_B = jnp.ones(b, wide) if weight_B is None else (weight_B > 0).astype(wide)
            count, shift_D, spread_D = moments(
                x_BxPxD.astype(wide) - mean_D[None, None], used_B, self.mode
            )
            self._remember(count, mean_D + shift_D, spread_D)
            mean_D, variance_D = mean_D + shift_D, spread_D
        factor_D = lax.rsqrt(variance_D + _EPSILON) * self.scale[...].astype(wide)
        offset_D = self.bias[...].astype(wide) - mean_D * factor_D
        y_BxPxD = x_BxPxD * factor_D[None, None] + offset_D[None, None]
        return y_BxPxD.astype(x_BxD.dtype).reshape(x_BxD.shape)

    def _remember(self, count: jax.Array, mean_D: jax.Array, variance_D: jax.Array) -> None:
        for average, new in ((self.mean, mean_D), (self.variance, variance_D)):
            old = average[...]
            moved = _MOMENTUM * old + (1 - _MOMENTUM) * lax.stop_gradient(new).astype(old.dtype)
            average[...] = jnp.where(count > 0, moved, old)


def moments(
    x_BxPxD: jax.Array, used_B: jax.Array, mode: Mode
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(count, mean, variance) over the used examples and all positions; zeros where none is used.

    One reduction for all three.  Squares cancel unless the mean is near 0: subtract what is known
    of it (the running average, equal on all devices) beforehand.
    """
    used_Bx1x1 = used_B[:, None, None]
    kept_BxPxD = x_BxPxD * used_Bx1x1
    count = jnp.sum(used_B) * x_BxPxD.shape[1]
    sums_3D = jnp.concatenate(
        [kept_BxPxD.sum((0, 1)), (kept_BxPxD * x_BxPxD).sum((0, 1)), count[None]]
    )
    if mode == "sync":
        sums_3D = sum_over_devices(sums_3D)
    features = x_BxPxD.shape[-1]
    total_D, squares_D, count = sums_3D[:features], sums_3D[features:-1], sums_3D[-1]
    mean_D, square_D = total_D / jnp.maximum(count, 1), squares_D / jnp.maximum(count, 1)
    return count, mean_D, jnp.maximum(square_D - mean_D * mean_D, 0)


@jax.custom_vjp
def _sum(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


_sum.defvjp(lambda x: (lax.psum(x, AXIS), None), lambda _, g: (lax.psum(g, AXIS),))


@allowed_in_loss
def sum_over_devices(x: jax.Array) -> jax.Array:
    """The sum over all devices, with the gradient of the sum of all devices' losses.

    Every device's loss depends on every device's x, through this sum: its gradient is the sum of
    what all devices' losses say.  Written out above, since what the gradient of a bare psum means
    depends on how `shard_map` is set.
    """
    return _sum(x)

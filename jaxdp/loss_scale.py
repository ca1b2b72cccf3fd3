"""Dynamic loss scaling: gradients computed in float16 neither underflow nor overflow for long.

    gradient = d(scale * loss) / scale

The scale is a power of two, so that dividing by it is exact; it is divided out on each device,
in float32, before anything is summed over devices, clipped or logged.  An overflow halves the scale
and skips the step; many good steps in a row double it.

Reference: P. Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.types import Batch, LossFn, LossOut, PyTree

_MOST = 2.0**24  # far beyond float16; the scaled loss stays far below float32's limit


class LossScale(NamedTuple):
    """The part of the train state that scaling adds, equal on every device.

    Attributes:
      scale: float32 scalar, a power of two from 1 to 2^24.
      good: int32 scalar, steps since the scale last changed.
      overflows: int32 scalar, steps without an update because a gradient overflowed.
    """

    scale: Any
    good: Any
    overflows: Any


class DynamicScale(NamedTuple):
    """How the scale behaves.

    Attributes:
      initial: a power of two.  Losses are sums over a device's examples, so that the first steps
        may find it too high.
      growth_steps: good steps after which the scale doubles.
    """

    initial: float = 2.0**15
    growth_steps: int = 2000

    def init(self) -> LossScale:
        """The state before step 0."""
        zero = np.zeros((), np.int32)
        return LossScale(np.float32(self.initial), zero, zero)


def scaled(loss: LossFn, state: LossScale | tuple[()]) -> LossFn:
    """`loss` times the scale; itself where there is none.  For what `checked_loss` returns."""
    if not state:
        return loss

    def scaled_loss(params: PyTree, model_state: PyTree, batch: Batch, keys: Any) -> LossOut:
        out = loss(params, model_state, batch, keys)
        return out._replace(sum=out.sum * state.scale)

    return scaled_loss


def unscaled(sums: dict[str, Any], state: LossScale | tuple[()]) -> dict[str, Any]:
    """The sums of a scaled loss and of its gradients as if there were no scale."""
    if not state:
        return sums
    total, weight = sums["scalars"]["loss"]
    scalars = sums["scalars"] | {"loss": jnp.stack([total / state.scale, weight])}
    grads = jax.tree.map(lambda g: g / state.scale.astype(g.dtype), sums["grads"])
    return sums | {"scalars": scalars, "grads": grads}


def overflowed(state: LossScale | tuple[()], loss: jax.Array, norm: jax.Array) -> jax.Array | bool:
    """Whether a smaller scale may help: the loss is finite, its gradient is not.

    Args:
      loss, norm: float scalars, reduced: the global loss and the norm of its gradient.
    """
    if not state:
        return False
    return jnp.isfinite(loss) & ~jnp.isfinite(norm) & (state.scale > 1)


def adjusted(
    state: LossScale | tuple[()], options: DynamicScale | None, updated: jax.Array, overflow: Any
) -> LossScale | tuple[()]:
    """The scale for the next step.

    Args:
      options: how it behaves; None where there is none.
      updated: bool scalar, whether this step changed the parameters.
      overflow: bool scalar, from `overflowed`.
    """
    if not state or options is None:
        return state
    good = state.good + updated
    grow = good >= options.growth_steps
    scale = jnp.where(grow, jnp.minimum(2 * state.scale, _MOST), state.scale)
    return LossScale(
        scale=jnp.where(overflow, jnp.maximum(state.scale / 2, 1), scale),
        good=jnp.where(grow | overflow, 0, good),
        overflows=state.overflows + overflow,
    )

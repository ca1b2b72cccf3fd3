"""The few layers that Flax lacks, or has slower or with other randomness.

Array names end in their shape, as in `x_BxTxD`: B examples, T positions, D features, H heads,
K features of one head, N rows (whatever leading dims, flattened).
"""

import jax
import jax.numpy as jnp
from flax import nnx


def dropout(
    x_Bx: jax.Array, rate: float, keys_B: jax.Array | None, layer: jax.Array | int
) -> jax.Array:
    """Zeroes a fraction `rate` of the features and scales the others by 1 / (1 - rate).

    The mask of example i is a function of `keys_B[i]` and `layer` alone: the same for every
    number of devices and every place in the batch.  (`nnx.Dropout` draws one mask for the batch.)

    Args:
      x_Bx: floats, `[b, ...]`.
      rate: fraction to drop, in [0, 1).
      keys_B: one random key per example, or None for no dropout.
      layer: number of this dropout in its network, so that no two share a mask.

    References: Srivastava et al., Dropout, 2014.
    """
    if keys_B is None or rate == 0.0:
        return x_Bx
    # Bits, not `bernoulli`, whose draws depend on jax_enable_x64: the mask must not.
    threshold = min(round(rate * 2**32), 2**32 - 1)

    def keep(key):
        bits = jax.random.bits(jax.random.fold_in(key, layer), x_Bx.shape[1:], jnp.uint32)
        return bits >= jnp.uint32(threshold)

    return jnp.where(jax.vmap(keep)(keys_B), x_Bx / (1.0 - rate), jnp.zeros_like(x_Bx))


def max_pool_2x2(x_BxHxWxC: jax.Array) -> jax.Array:
    """The maximum of each 2x2 square; an odd last row or column is cropped, as PyTorch does.

    A reshape and `max`: the backward pass of `reduce_window` takes 25 times its forward on CPU.
    """
    b, h, w, c = x_BxHxWxC.shape
    even = x_BxHxWxC[:, : h // 2 * 2, : w // 2 * 2]
    return even.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim; the mean square is taken in float32 at least.

    References: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones(features, jnp.float32))

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        wide = x_NxD.astype(jnp.promote_types(x_NxD.dtype, jnp.float32))
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return x_NxD * inverse.astype(x_NxD.dtype) * self.scale[None, :]


def rotate(x_BxHxTxK: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotary positions: feature pairs (k, k + K/2) at position t turned by t / base^(2k/K).

    References: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    t, k = x_BxHxTxK.shape[-2:]
    wide = jnp.promote_types(x_BxHxTxK.dtype, jnp.float32)
    frequency = base ** (-jnp.arange(k // 2, dtype=wide) / (k // 2))
    angle_1x1xTxK = (jnp.arange(t, dtype=wide)[:, None] * frequency[None])[None, None]
    cos = jnp.cos(angle_1x1xTxK).astype(x_BxHxTxK.dtype)
    sin = jnp.sin(angle_1x1xTxK).astype(x_BxHxTxK.dtype)
    first, second = jnp.split(x_BxHxTxK, 2, -1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

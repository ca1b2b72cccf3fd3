"""The few layers that Flax lacks, or has slower or with other randomness.

Array names end in their shape, as in `x_BxTxD`: B examples, T positions, D features, H heads,
K features of one head, N rows (whatever leading dims, flattened).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.errors import UserError


def fraction(name: str, value: float) -> float:
    """`value`, if it lies in [0, 1); a `UserError` otherwise."""
    if not 0.0 <= value < 1.0:
        raise UserError(f"{name} must be at least 0 and below 1, got {value}")
    return value


def dropout(x_Bx: jax.Array, rate: float, keys_B: jax.Array | None, layer: int) -> jax.Array:
    """Zeroes a fraction `rate` of the features and scales the others by 1 / (1 - rate).

    The mask of example i is a function of `keys_B[i]` and `layer` alone: the same for every
    number of devices and every place in the batch.  (`nnx.Dropout` draws one mask for the batch.)

    Args:
      x_Bx: floats, `[b, ...]`.
      rate: fraction to drop, in [0, 1).
      keys_B: one random key per example, or None for no dropout.
      layer: the number of this dropout in its network, so that no two share a mask.

    References: Srivastava et al., Dropout, 2014.
    """
    if keys_B is None or rate == 0.0:
        return x_Bx
    # Bits, not `bernoulli`, whose draws depend on jax_enable_x64: the mask must not.
    threshold = round(rate * 2**32)

    def keep(key):
        bits = jax.random.bits(jax.random.fold_in(key, layer), x_Bx.shape[1:], jnp.uint32)
        return bits >= jnp.uint32(threshold)

    return jnp.where(jax.vmap(keep)(keys_B), x_Bx / (1.0 - rate), jnp.zeros_like(x_Bx))


_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x) in the tanh form; the backward pass multiplies by a derivative saved in the forward.

    XLA:CPU fuses the derived backward badly: it computes the tanh anew, several times.

    References: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
    """
    return _gelu_and_derivative(x)[0]


def _gelu_and_derivative(x):
    square = x * x
    tanh = jnp.tanh(_GELU_SCALE * x * (1.0 + _GELU_CUBIC * square))
    half = 0.5 * (1.0 + tanh)
    slope = _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBIC * square)
    return x * half, half + 0.5 * x * (1.0 - tanh * tanh) * slope


gelu.defvjp(_gelu_and_derivative, lambda derivative, g: (g * derivative,))


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
        self.scale = nnx.Param(jnp.ones(features))

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        wide = x_NxD.astype(jnp.promote_types(x_NxD.dtype, jnp.float32))
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return x_NxD * inverse.astype(x_NxD.dtype) * self.scale[...]


def rotate(x_BxHxTxK: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotary positions: feature pairs (k, k + K/2) at position t turned by t / base^(2k/K).

    References: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    t, k = x_BxHxTxK.shape[-2:]
    frequency = base ** (-jnp.arange(k // 2, dtype=jnp.float32) / (k // 2))
    angle_TxK = jnp.arange(t, dtype=jnp.float32)[:, None] * frequency
    cos = jnp.cos(angle_TxK).astype(x_BxHxTxK.dtype)
    sin = jnp.sin(angle_TxK).astype(x_BxHxTxK.dtype)
    first, second = jnp.split(x_BxHxTxK, 2, -1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

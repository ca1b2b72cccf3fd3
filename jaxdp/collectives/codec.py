"""Codecs: what travels instead of values.

A codec turns values into words, integers as wide as its wire format: integers travel as they are
on every platform, whereas XLA:CPU carries 16-bit floats as float32.  `decode(encode(x))` is what
the receiver computes with, so the sender must compute with it too, or replicas part.

    wire       words of k values                error of one rounding, relative to
    bfloat16   k uint16                         2**-8     the value
    float16    k uint16                         2**-11    the value (2**-25 n of small ones)
    int8       k + 4 uint8 in blocks of 256     1/254     the largest of the block
    exact      the bits                         0

float16 ends at 65504: values are divided by the number of ranks, rounded up to a power of two so
that the division is exact; their sum then fits where each of them does.

A value that is not finite arrives as one that is not: int8 gives its whole block NaN as the scale.

Reference: T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 256  # values of int8 that share a float32 scale


class Codec(NamedTuple):
    """A wire format, for vectors along the last dimension.

    Attributes:
      grain: encoded vectors have a multiple of this length.
      word: the dtype of the words.
      words: number of values -> number of words.
      encode: `[..., k]` -> words `[..., words(k)]`.
      decode: words -> `[..., k]`, of at least float32.
    """

    grain: int
    word: Any
    words: Callable[[int], int]
    encode: Callable[[jax.Array], jax.Array]
    decode: Callable[[jax.Array], jax.Array]


def exact(dtype: Any, word: Any) -> Codec:
    """The bits of `dtype`, in words that are no wider."""
    dtype, word = jnp.dtype(dtype), jnp.dtype(word)
    return Codec(
        1,
        word,
        lambda k: k * dtype.itemsize // word.itemsize,
        lambda x: _to_words(x, word),
        lambda words: _from_words(words, dtype),
    )


def bfloat16(n: int) -> Codec:
    """The upper half of a float32."""
    return Codec(
        1,
        jnp.dtype(jnp.uint16),
        lambda k: k,
        lambda x: _to_words(x.astype(jnp.bfloat16), jnp.uint16),
        lambda words: _from_words(words.astype(jnp.uint32) << 16, jnp.float32),
    )


def float16(n: int) -> Codec:
    """Three more bits than bfloat16, and a small range: divided by `n` ranks."""
    divisor = float(power_of_two(n))

    def encode(x: jax.Array) -> jax.Array:
        return _to_words((x / jnp.asarray(divisor, x.dtype)).astype(jnp.float16), jnp.uint16)

    return Codec(
        1,
        jnp.dtype(jnp.uint16),
        lambda k: k,
        encode,
        lambda words: _widen_float16(words) * np.float32(divisor),
    )


def power_of_two(n: int) -> int:
    """The least that is not below `n`: a division by it loses nothing."""
    return 1 << (n - 1).bit_length()


def int8(n: int) -> Codec:
    """-127 to 127 times a scale per block of `BLOCK` values."""
    return Codec(
        BLOCK, jnp.dtype(jnp.uint8), lambda k: k + 4 * (k // BLOCK), _encode_int8, _decode_int8
    )


# wire -> (number of ranks -> codec)
CODECS: dict[str, Callable[[int], Codec]] = {
    "bfloat16": bfloat16,
    "float16": float16,
    "int8": int8,
}


# The 16-bit formats are decoded by integer arithmetic.  XLA may compute with more precision than
# asked for (xla_allow_excess_precision) and leave out float32 -> bfloat16 -> float32 where it sees
# both: on the rank that sends, not on the one that receives.  It cannot see them here.  (A caution:
# XLA:CPU 0.10.2 and 0.12 did not do it.)
def _widen_float16(words: jax.Array) -> jax.Array:
    bits = words.astype(jnp.uint32)
    exponent, fraction = bits >> 10 & 31, bits & 1023
    shift = jnp.where(exponent == 31, np.uint32(224), np.uint32(112))  # 31 stays the highest: NaN
    normal = _from_words((bits & 0x7FFF) + (shift << 10) << 13, jnp.float32)
    small = fraction.astype(jnp.float32) * np.float32(2**-24)
    size = jnp.where(exponent == 0, small, normal)
    return jnp.where(bits >> 15 == 1, -size, size)


def _encode_int8(x: jax.Array) -> jax.Array:
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    # XLA:CPU may drop a NaN from a maximum (seen with 0.10.2, fused with what came before)
    finite = jnp.isfinite(blocks).all(-1, keepdims=True)
    top = jnp.where(finite, jnp.abs(blocks).max(-1, keepdims=True), jnp.nan)
    # the quotient first: a small block's top / 127 may be subnormal and flushed to 0
    steps = jnp.round(blocks * (127 / jnp.where(top > 0, top, 1)))
    values = jnp.where(top > 0, steps, 0).astype(jnp.int8)
    flat = values.reshape(*x.shape[:-1], -1)
    scales = _to_words((top / 127)[..., 0], jnp.uint8)
    return jnp.concatenate([_to_words(flat, jnp.uint8), scales], -1)


def _decode_int8(words: jax.Array) -> jax.Array:
    k = words.shape[-1] // (BLOCK + 4) * BLOCK
    values = _from_words(words[..., :k], jnp.int8).astype(jnp.float32)
    scales = _from_words(words[..., k:], jnp.float32)
    blocks = values.reshape(*words.shape[:-1], -1, BLOCK) * scales[..., None]
    return blocks.reshape(*words.shape[:-1], k)


def _to_words(x: jax.Array, word: Any) -> jax.Array:
    words = lax.bitcast_convert_type(x, word)
    return words.reshape(*x.shape[:-1], -1)


def _from_words(words: jax.Array, dtype: Any) -> jax.Array:
    per_value = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    if per_value > 1:
        words = words.reshape(*words.shape[:-1], -1, per_value)
    return lax.bitcast_convert_type(words, dtype)

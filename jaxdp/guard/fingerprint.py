"""A hash of arrays that adds up: the sum over any set of blocks is the hash of the whole.

    h_1 = sum over elements e of  a(e, index of e)   mod 2^32
    h_2 = sum over elements e of  s(a(e, index of e))  mod 2^32

`s` is a bijective scrambling of 32 bits, and so is `a(., index)` for elements of up to 32: one that
changes always changes both sums.  Several go unseen with a chance of about 2^-64.  The index is the
element's place in the whole array: a permuted array has another hash, and a block hashes to its
share of the whole.  Sums of integers do not depend on their order: devices, shards and NumPy agree
to the bit.

NaNs are all the same, since replicas' NaNs may differ in sign and payload; 0.0 and -0.0 differ.
This finds accidents.  It is no defence against an adversary.

Reference: A. Appleby, MurmurHash3 (the scrambling is its 32-bit finaliser).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_GOLDEN = np.uint32(0x9E3779B9)  # 2^32 over the golden ratio: index 0 is not a fixed point
_NAN = np.uint32(0xFFFFFFFF)  # a NaN itself, and more than a narrower type can hold


def fingerprint(
    block: jax.Array, shape: Sequence[int] | None = None, start: Sequence[Any] | None = None
) -> jax.Array:
    """The hash of a block of an array; traceable.

    Args:
      block: of any dtype; random keys count as their data.
      shape: of the whole array; the block's own by default.
      start: where the block begins, one int (or traced integer) per dim; at 0 by default.

    Returns:
      uint32 [2].  Modulo 2^32, the sum over the blocks of a partition is the hash of the whole.
    """
    words = _words(block)
    index = jnp.zeros(words[0].shape, jnp.uint32)
    for dim, stride in enumerate(_strides(shape or words[0].shape)):
        along = lax.broadcasted_iota(jnp.uint32, index.shape, dim)
        index = index + (along + _uint32(start[dim] if start is not None else 0)) * stride
    zero = np.uint32(0)
    # one reduction of two: XLA:CPU would keep the scrambled array in memory for the second sum
    sums = lax.reduce(_mix(words, index), (zero, zero), _add_pairs, tuple(range(index.ndim)))
    return jnp.stack(sums)


def fingerprint_numpy(
    block: np.ndarray, shape: Sequence[int] | None = None, start: Sequence[int] | None = None
) -> np.ndarray:
    """`fingerprint` on the host, bit for bit the same."""
    block = np.asarray(block)
    index = np.zeros(block.shape, np.uint32)
    for dim, stride in enumerate(_strides(shape or block.shape)):
        along = np.arange(block.shape[dim], dtype=np.uint64)
        along = (along + np.uint64(start[dim] if start is not None else 0)).astype(np.uint32)
        index += (along * stride).reshape(-1, *[1] * (block.ndim - dim - 1))
    mixed = _mix(_words_numpy(block), index.reshape(-1))
    return np.array([np.sum(h, dtype=np.uint64) for h in mixed]).astype(np.uint32)


def _strides(shape: Sequence[int]) -> list[np.uint32]:
    """Elements from one index to the next along each dim, row-major, mod 2^32."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(np.uint32(stride % 2**32))
        stride *= size
    return strides[::-1]


def _add_pairs(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return a[0] + b[0], a[1] + b[1]


def _uint32(x: Any) -> Any:
    return x.astype(jnp.uint32) if isinstance(x, jax.Array) else np.uint32(int(x) % 2**32)


def _mix(words: list[Any], index: Any) -> tuple[Any, Any]:
    """a and s(a) of elements given as words, for arrays of either library."""
    h = _scramble(index + _GOLDEN)
    for word in words:
        h = _scramble(h ^ word)
    return h, _scramble(h + _GOLDEN)


def _scramble(x: Any) -> Any:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of each element as uint32s, the low ones first."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _halves(x)
    bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return [jnp.where(x != x, _NAN, word) for word in _halves(bits)]


def _words_numpy(x: np.ndarray) -> list[np.ndarray]:
    x = np.ascontiguousarray(x).reshape(-1)
    if np.issubdtype(x.dtype, np.complexfloating):
        return [*_words_numpy(np.real(x)), *_words_numpy(np.imag(x))]
    if not jnp.issubdtype(x.dtype, jnp.floating):  # NumPy's own does not know bfloat16
        return _halves(x)
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # a signalling NaN is one of those looked for
        nan = x != x
    return [np.where(nan, _NAN, word) for word in _halves(bits)]


def _halves(x: Any) -> list[Any]:
    """Integers as uint32s: one, or low and high of 64 bits; for arrays of either library."""
    if x.dtype.itemsize <= 4:
        return [x.astype(np.uint32)]
    return [x.astype(np.uint32), (x >> x.dtype.type(32)).astype(np.uint32)]

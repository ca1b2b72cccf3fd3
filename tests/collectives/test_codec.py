"""Codecs: what one rounding costs, and what must survive it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.collectives.codec import BLOCK, CODECS, bfloat16, exact, float16, int8, power_of_two

NARROW = {"bfloat16": (bfloat16, jnp.bfloat16), "float16": (float16, np.float16)}


def carried(codec, x):
    return np.asarray(jax.jit(lambda x: codec.decode(codec.encode(x)))(x))


def rounding(wire, x, n):
    """The most that one rounding of `x` is off, elementwise: half a unit in the last place."""
    size = np.abs(np.float64(x))
    if wire == "bfloat16":
        return size * 2.0**-8
    if wire == "float16":
        return np.maximum(size * 2.0**-11, 2.0**-25 * power_of_two(n))
    blocks = np.abs(np.float64(x)).reshape(*x.shape[:-1], -1, BLOCK)
    top = np.broadcast_to(blocks.max(-1, keepdims=True), blocks.shape).reshape(x.shape)
    return top / 254 * (1 + 2.0**-20)  # and the float32 rounding of scale and product


@pytest.mark.parametrize("wire", NARROW)
def test_every_word_is_decoded_as_its_format_says(wire):
    make, dtype = NARROW[wire]
    words = np.arange(1 << 16, dtype=np.uint16)
    expected = words.view(dtype).astype(np.float32)
    decoded = np.asarray(jax.jit(make(1).decode)(words))
    np.testing.assert_array_equal(decoded, expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(decoded)[finite], np.signbit(expected)[finite])


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("wire", CODECS)
def test_one_rounding_is_within_its_bound(wire, n, rng):
    # magnitudes over what float16 can hold, its subnormal numbers included
    x = (rng.normal(size=(3, 5 * BLOCK)) * 2.0 ** rng.integers(-30, 14, (3, 5 * BLOCK))).astype(
        np.float32
    )
    codec = CODECS[wire](n)
    words = codec.encode(x)
    assert words.shape == (3, codec.words(5 * BLOCK))
    assert words.dtype == codec.word
    error = np.abs(np.float64(carried(codec, x)) - x)
    assert (error <= rounding(wire, x, n)).all()
    assert error.max() > 0


@pytest.mark.parametrize("wire", CODECS)
def test_words_are_a_fixed_point(wire, rng):
    """What was decoded is encoded to what it decodes to: the owner and the others agree."""
    x = rng.normal(size=4 * BLOCK).astype(np.float32)
    codec = CODECS[wire](4)
    once = carried(codec, x)
    np.testing.assert_allclose(carried(codec, once), once, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wire", CODECS)
def test_r3_what_is_not_finite_stays_so(wire, bad, rng):
    x = rng.normal(size=3 * BLOCK).astype(np.float32)
    at = int(rng.integers(BLOCK, 2 * BLOCK))
    x[at] = bad
    y = carried(CODECS[wire](3), x)
    assert not np.isfinite(y[at])
    assert np.isfinite(y[:BLOCK]).all()
    assert np.isfinite(y[2 * BLOCK :]).all()


def test_v8_float16_holds_the_sum_of_what_it_holds():
    for n in (1, 2, 3, 4, 9):
        x = np.full(7, 60_000, np.float32)
        assert np.isfinite(carried(float16(n), n * x)).all()
    assert not np.isfinite(carried(float16(1), 2 * x)).all()


def test_int8_holds_zeros_and_the_ends_of_a_block():
    x = np.zeros(3 * BLOCK, np.float32)
    x[BLOCK : BLOCK + 2] = -3e-39, 3e-39  # subnormal: may be flushed, is never NaN
    x[2 * BLOCK :] = np.linspace(-127, 127, BLOCK)
    y = carried(int8(2), x)
    assert (y[:BLOCK] == 0).all()
    assert np.abs(y[BLOCK : 2 * BLOCK]).max() <= 6e-39
    assert (y[[2 * BLOCK, -1]] == [-127, 127]).all()


@pytest.mark.parametrize("word", [np.uint8, np.uint16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16, np.float16])
def test_exact_is_exact(dtype, word, rng):
    with jax.enable_x64(True):
        x = rng.normal(size=(2, 33)).astype(dtype)
        codec = exact(dtype, word)
        assert codec.encode(x).shape == (2, codec.words(33))
        y = carried(codec, x)
        assert y.dtype == x.dtype
        assert y.tobytes() == x.tobytes()

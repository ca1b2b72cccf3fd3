"""The hash: against plain integers, over blocks, and what it must and must not tell apart."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdp.guard import fingerprint, fingerprint_numpy

M = 2**32
INTEGERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
DTYPES = [*INTEGERS, *FLOATS, "complex64", "complex128"]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def random_array(rng, name, shape):
    """Random bits; NaNs and infinities among them."""
    dtype = dtype_of(name)
    if name == "bool":
        return rng.random(shape) < 0.5
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape).copy()


def scramble(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B % M
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % M
    return x ^ (x >> 16)


def words(value):
    """The uint32 words of one element, by Python's integers."""
    if np.iscomplexobj(value):
        return words(value.real) + words(value.imag)
    if value.dtype.kind in "iub":
        number, bits = int(value), max(32, 8 * value.itemsize)
    elif value != value:  # np.isnan warns of a signalling NaN
        return [M - 1] * max(1, value.itemsize // 4)
    else:
        number, bits = int.from_bytes(value.tobytes(), "little"), max(32, 8 * value.itemsize)
    return [number >> shift & M - 1 for shift in range(0, bits, 32)]


def plain(x):
    """The definition, element by element."""
    first = second = 0
    for index, value in enumerate(x.reshape(-1)):
        h = scramble((index + 0x9E3779B9) % M)
        for word in words(value):
            h = scramble(h ^ word)
        first, second = first + h, second + scramble((h + 0x9E3779B9) % M)
    return [first % M, second % M]


@pytest.mark.parametrize("name", DTYPES)
def test_device_numpy_and_plain_integers_agree(name, rng):
    for shape in [(), (0,), (1,), (13,), (3, 5), (2, 1, 7)]:
        x = random_array(rng, name, shape)
        assert fingerprint_numpy(x).tolist() == plain(x)
        with jax.enable_x64(True):
            assert jax.jit(fingerprint)(x).tolist() == plain(x)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
def test_blocks_add_up_to_the_whole(name, rng):
    x = random_array(rng, name, (6, 10, 4))
    whole = fingerprint_numpy(x)
    cuts = [(0, *sorted(rng.choice(np.arange(1, n), 2, replace=False)), n) for n in x.shape]
    total = np.zeros(2, np.uint32)
    with jax.enable_x64(True):
        hashed = jax.jit(fingerprint, static_argnums=1)
        for corner in np.ndindex(3, 3, 3):
            start = [cut[i] for cut, i in zip(cuts, corner, strict=True)]
            stop = [cut[i + 1] for cut, i in zip(cuts, corner, strict=True)]
            block = x[tuple(map(slice, start, stop))]
            on_host = fingerprint_numpy(block, x.shape, start)
            assert hashed(block, x.shape, start).tolist() == on_host.tolist()
            total += on_host
    assert total.tolist() == whole.tolist()
    # flat pieces too, as a sharded optimizer holds them
    flat, cut = x.reshape(-1), int(rng.integers(1, x.size))
    pieces = [
        fingerprint_numpy(flat[:cut], flat.shape, [0]),
        fingerprint_numpy(flat[cut:], flat.shape, [cut]),
    ]
    assert (pieces[0] + pieces[1]).tolist() == whole.tolist()


def test_places_beyond_32_bits_wrap_in_the_same_way(rng):
    block, shape, start = (
        random_array(rng, "float32", (2, 3)),
        (70_000, 70_001),
        (69_990, 12_345),
    )  # past 4.8e9
    index = [
        (row * shape[1] + column) % M for row in (69_990, 69_991) for column in range(12345, 12348)
    ]
    expected = sum(
        scramble(scramble((i + 0x9E3779B9) % M) ^ words(v)[0])
        for i, v in zip(index, block.reshape(-1), strict=True)
    )
    assert int(fingerprint_numpy(block, shape, start)[0]) == expected % M
    assert int(jax.jit(lambda x: fingerprint(x, shape, start))(block)[0]) == expected % M


@pytest.mark.parametrize("name", DTYPES)
def test_every_single_bit_counts(name, rng):
    x = random_array(rng, name, (31,))
    with np.errstate(invalid="ignore"):
        x = np.where(x == x, x, np.zeros((), x.dtype))
    if name == "bool":
        x = x.astype(np.uint8)  # other bits than the lowest are no bool
    before = fingerprint_numpy(x)
    bits = x.view(np.uint8)
    for bit in rng.choice(8 * bits.size, 31, replace=False):
        bits[bit // 8] ^= 1 << bit % 8
        assert (fingerprint_numpy(x) != before).all()
        bits[bit // 8] ^= 1 << bit % 8


def test_order_sign_of_zero_and_infinity_count_and_the_kind_of_nan_does_not(rng):
    x = rng.normal(size=9).astype(np.float32)
    swapped = x[[1, 0, *range(2, 9)]]
    assert fingerprint_numpy(swapped).tolist() != fingerprint_numpy(x).tolist()

    def hashes(*values):
        return {tuple(fingerprint(jnp.asarray([v, 1], v.dtype)).tolist()) for v in values}

    f32 = np.float32
    assert len(hashes(f32(0.0), f32(-0.0), f32(np.inf), f32(-np.inf), f32(np.nan))) == 5
    patterns = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    assert len(hashes(*patterns.view(np.float32))) == 1


def test_random_keys_count_as_their_data(rng):
    key = jax.random.key(int(rng.integers(2**31)))
    data = np.asarray(jax.random.key_data(key))
    assert fingerprint(key).tolist() == fingerprint_numpy(data).tolist()

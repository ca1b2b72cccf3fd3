"""Layers against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.models.layers import RMSNorm, dropout, max_pool_2x2, rotate


def keys_of(n: int, seed: int = 0) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(n))


def test_dropout_is_a_function_of_the_examples_key():
    x, keys = jnp.ones((8, 5, 7)), keys_of(8)
    whole = jax.jit(lambda x, k: dropout(x, 0.4, k, 3))(x, keys)
    halves = [dropout(x[i : i + 4], 0.4, keys[i : i + 4], 3) for i in (0, 4)]
    np.testing.assert_array_equal(whole, jnp.concatenate(halves))
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    np.testing.assert_array_equal(whole[order], dropout(x, 0.4, keys[order], 3))


def test_dropout_differs_between_examples_and_layers():
    x, keys = jnp.ones((2, 200)), keys_of(2)
    first, second = dropout(x, 0.5, keys, 0)
    assert 60 < np.sum(first != second) < 140
    assert 60 < np.sum(first != dropout(x, 0.5, keys, 1)[0]) < 140


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_rate_and_mean(rate):
    n = 64 * 4096
    y = np.asarray(dropout(jnp.ones((64, 4096)), rate, keys_of(64), 0))
    assert set(np.unique(y)) == {0.0, np.float32(1.0) / np.float32(1.0 - rate)}
    assert abs(np.mean(y == 0.0) - rate) < 5 * np.sqrt(rate * (1 - rate) / n)


def test_dropout_identity_without_keys_or_rate():
    x = jax.random.normal(jax.random.key(0), (3, 4))
    assert dropout(x, 0.5, None, 0) is x
    assert dropout(x, 0.0, keys_of(3), 0) is x


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dropout_mask_is_the_same_in_every_dtype(dtype):
    single = np.asarray(dropout(jnp.ones((4, 99)), 0.3, keys_of(4), 0))
    with jax.enable_x64(dtype == "float64"):
        other = dropout(jnp.ones((4, 99), dtype), 0.3, keys_of(4), 0)
        assert other.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(single > 0, np.asarray(other) > 0)


@pytest.mark.parametrize(("h", "w"), [(4, 6), (5, 7), (2, 3)])
def test_max_pool_crops_odd_sizes(h, w):
    x = np.random.default_rng(0).normal(size=(2, h, w, 3)).astype(np.float32)
    expected = np.full((2, h // 2, w // 2, 3), -np.inf, np.float32)
    for i in range(h // 2 * 2):
        for j in range(w // 2 * 2):
            expected[:, i // 2, j // 2] = np.maximum(expected[:, i // 2, j // 2], x[:, i, j])
    np.testing.assert_array_equal(max_pool_2x2(jnp.asarray(x)), expected)


def test_max_pool_gradient_goes_to_the_maximum():
    x = np.random.default_rng(1).normal(size=(2, 4, 5, 3)).astype(np.float32)
    weights = np.random.default_rng(2).normal(size=(2, 2, 2, 3)).astype(np.float32)
    gradient = jax.grad(lambda x: jnp.sum(max_pool_2x2(x) * weights))(jnp.asarray(x))
    expected = np.zeros_like(x)
    for b, i, j, c in np.ndindex(weights.shape):
        square = x[b, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2, c]
        y, z = np.unravel_index(square.argmax(), (2, 2))
        expected[b, 2 * i + y, 2 * j + z, c] = weights[b, i, j, c]
    np.testing.assert_allclose(gradient, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm(dtype):
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(6, 32)) * 3, rng.normal(size=32)
    norm = RMSNorm(32)
    norm.scale.set_value(jnp.asarray(scale, dtype))
    y = norm(jnp.asarray(x, dtype))
    assert y.dtype == dtype
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(
        y.astype(np.float32), expected, atol=1e-5 if dtype == jnp.float32 else 0.06
    )


def test_rotate_against_complex_numbers():
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 8)).astype(np.float32)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
        1j * np.arange(9)[:, None] * 10000.0 ** (-np.arange(4) / 4)
    )
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(rotate(jnp.asarray(x)), expected, atol=1e-5)


def test_rotated_products_depend_on_the_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    q, k = (jnp.broadcast_to(jnp.asarray(x), (1, 1, 12, 8)) for x in (q, k))
    products = np.asarray(rotate(q)[0, 0] @ rotate(k)[0, 0].T)
    for distance in range(-5, 6):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)


def test_a_dropout_of_nearly_all():
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    out = dropout(jnp.ones((3, 8)), 1 - 1e-12, keys, 0)
    assert out.shape == (3, 8)
    assert not out.any()

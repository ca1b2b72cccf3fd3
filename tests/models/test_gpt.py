"""The transformer: causality, tied embeddings, attention against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.models import build_model
from jaxdp.models.gpt import causal_attention

SIZES: dict = {"shape": (12,), "num_classes": 17, "layers": 2, "width": 16, "heads": 4}


@functools.cache  # so that tests share what was compiled
def built(positions: str = "learned"):
    model = build_model("gpt", **SIZES, positions=positions)
    return jax.jit(model.apply), model.init(jax.random.key(0))[0]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_token_changes_only_what_follows(positions):
    apply, params = built(positions)
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 17)
    before, _ = apply(params, {}, tokens, None)
    for t in (0, 5, 11):
        after, _ = apply(params, {}, tokens.at[:, t].add(1) % 17, None)
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert np.all(np.abs(before - after)[:, t:].max(-1) > 1e-6)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_short_input_gives_the_first_outputs_of_a_long_one(positions):
    apply, params = built(positions)
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 17)
    long, _ = apply(params, {}, tokens, None)
    short, _ = apply(params, {}, tokens[:, :5], None)
    np.testing.assert_allclose(short, long[:, :5], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_order_of_tokens_matters(positions):
    apply, params = built(positions)
    tokens = jnp.array([[1, 2, 3, 4], [2, 1, 3, 4]])
    logits, _ = apply(params, {}, tokens, None)
    assert np.abs(logits[0, -1] - logits[1, -1]).max() > 1e-6


def test_embeddings_are_tied():
    """Logits are linear in the output side: the row of a token that is not in the input."""
    apply, params = built()
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    before, _ = apply(params, {}, tokens, None)
    doubled = {**params, "embedding": params["embedding"].at[9].multiply(2.0)}
    after, _ = apply(doubled, {}, tokens, None)
    np.testing.assert_allclose(after[..., 9], 2.0 * before[..., 9], rtol=1e-5)
    np.testing.assert_array_equal(np.delete(after, 9, -1), np.delete(before, 9, -1))
    assert not any("logits" in name for name in params)


def test_residual_branches_start_small():
    deep = build_model("gpt", **{**SIZES, "layers": 8, "width": 64})
    block = deep.init(jax.random.key(0))[0]["blocks"]["03"]
    for name, inputs in (("attention_out", 64), ("mlp_out", 256)):
        std = np.std(block[name]["kernel"])
        assert std == pytest.approx(inputs**-0.5 / 4, rel=0.05), name
    assert np.std(block["qkv"]["kernel"]) == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("scale", [1.0, 100.0])  # 100: most weights underflow, the largest is 1
def test_attention_against_numpy(scale):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, 7, 4)).astype(np.float32) for _ in range(3))
    q *= scale
    expected = np.zeros_like(v)
    for b, h, t in np.ndindex(2, 3, 7):
        scores = k[b, h, : t + 1].astype(np.float64) @ q[b, h, t] / 2.0
        weights = np.exp(scores - scores.max())
        expected[b, h, t] = weights / weights.sum() @ v[b, h, : t + 1]
    actual = causal_attention(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def gradient(model, dtype=jnp.float32):
    """A jitted (params, tokens, keys) -> gradient of a number that depends on every logit."""

    def total(params, tokens, keys):
        logits, _ = model.apply(params, {}, tokens, keys)
        return (jnp.sin(jnp.arange(logits.size, dtype=dtype).reshape(logits.shape)) * logits).sum()

    return jax.jit(jax.grad(total))


def test_remat_is_the_same_network_with_the_same_dropout(rng):
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(int(rng.integers(99)), impl="threefry2x32"), 3)
        plain, again = (
            build_model("gpt", **SIZES, dropout=0.3, positions="rotary", remat=remat)
            for remat in (False, True)
        )
        params = jax.tree.map(lambda x: x.astype(np.float64), plain.init(keys[0])[0])
        tokens = jnp.asarray(rng.integers(0, 17, (3, 12)))
        expected, found = (gradient(m, jnp.float64)(params, tokens, keys) for m in (plain, again))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), expected, found
        )


def test_remat_takes_less_memory():
    sizes = SIZES | {"shape": (64,), "layers": 8, "width": 32}
    params = build_model("gpt", **sizes).init(jax.random.key(0))[0]
    tokens = jnp.zeros((32, 64), jnp.int32)
    plain, again = (
        gradient(build_model("gpt", **sizes, remat=remat))
        .lower(params, tokens, None)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for remat in (False, True)
    )
    assert again < plain / 2

"""Losses against NumPy, and examples that must not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.errors import UserError
from jaxdp.losses import classification_loss, language_loss
from jaxdp.models import build_model
from jaxdp.types import Model

B, C, T, V = 6, 4, 5, 7


def linear() -> Model:
    """Logits x @ w, or w[token]; its state counts calls."""

    def apply(params, state, x, keys):
        del keys
        logits = params["w"][x] if jnp.issubdtype(x.dtype, jnp.integer) else x @ params["w"]
        return logits, {"calls": state["calls"] + 1}

    return Model(lambda key: ({}, {}), apply)


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


def images(seed=0):
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=(3, C)).astype(np.float32)}
    batch = {
        "inputs": rng.normal(size=(B, 3)).astype(np.float32),
        "label": rng.integers(0, C, B).astype(np.int32),
        "weight": rng.uniform(0.1, 2.0, B).astype(np.float32),
    }
    return params, batch


def text(seed=0):
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=(V, V)).astype(np.float32)}
    batch = {
        "tokens": rng.integers(0, V, (B, T + 1)).astype(np.int32),
        "weight": rng.uniform(0.1, 2.0, B).astype(np.float32),
        "mask": rng.uniform(0.0, 2.0, (B, T)).astype(np.float32),
    }
    return params, batch


def total(loss_fn, batch, model_state=None):
    """The loss as jax sees it in training."""
    state = {"calls": jnp.int32(0)} if model_state is None else model_state
    arrays = jax.tree.map(jnp.asarray, batch)
    return lambda params: loss_fn(params, state, arrays, None).sum


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classification_against_numpy(smoothing):
    params, batch = images()
    out = classification_loss(linear(), smoothing)(params, {"calls": 3}, batch, None)
    log_p = log_softmax(batch["inputs"] @ params["w"])
    wanted = np.full((B, C), smoothing / C)
    wanted[np.arange(B), batch["label"]] += 1.0 - smoothing
    nats = -np.sum(wanted * log_p, -1)
    correct = log_p.argmax(-1) == batch["label"]
    assert 0 < correct.sum() < B
    assert out.sum == pytest.approx(np.sum(batch["weight"] * nats), rel=1e-5)
    assert out.weight == pytest.approx(np.sum(batch["weight"]))
    assert out.metrics["accuracy"][0] == pytest.approx(np.sum(batch["weight"] * correct))
    assert out.metrics["accuracy"][1] == out.weight
    assert out.model_state == {"calls": 4}


@pytest.mark.parametrize("given", [(), ("weight",), ("mask",), ("weight", "mask")])
def test_language_against_numpy(given):
    params, batch = text()
    batch = {"tokens": batch["tokens"], **{name: batch[name] for name in given}}
    out = language_loss(linear())(params, {"calls": 0}, batch, None)
    weight = np.ones((B, T)) * batch.get("mask", 1.0) * batch.get("weight", np.ones(B))[:, None]
    log_p = log_softmax(params["w"])
    nats = correct = 0.0
    for b, t in np.ndindex(B, T):
        now, following = batch["tokens"][b, t : t + 2]
        nats -= weight[b, t] * log_p[now, following]
        correct += weight[b, t] * (log_p[now].argmax() == following)
    assert out.sum == pytest.approx(nats, rel=1e-5)
    assert out.weight == pytest.approx(weight.sum(), rel=1e-5)
    assert out.metrics["bits_per_byte"][0] == pytest.approx(nats / np.log(2), rel=1e-5)
    assert out.metrics["accuracy"][0] == pytest.approx(correct, rel=1e-5)
    assert all(weight == out.weight for _, weight in out.metrics.values())
    assert out.model_state == {"calls": 1}


def test_bits_can_have_another_name():
    params, batch = text()
    out = language_loss(linear(), "bits_per_token")(params, {"calls": 0}, batch, None)
    assert list(out.metrics) == ["bits_per_token", "accuracy"]


def test_no_weight_means_weight_one():
    params, batch = images()
    del batch["weight"]
    out = classification_loss(linear())(params, {"calls": 0}, batch, None)
    assert out.weight == B
    ones = classification_loss(linear())(
        params, {"calls": 0}, {**batch, "weight": np.ones(B, np.float32)}, None
    )
    assert out.sum == ones.sum


@pytest.mark.parametrize(
    ("loss_fn", "make", "junk"),
    [
        (classification_loss(linear(), 0.1), images, {"inputs": np.nan, "label": 99}),
        (classification_loss(linear()), images, {"inputs": np.inf, "label": -5}),
        (language_loss(linear()), text, {"tokens": 1_000_000}),
    ],
)
def test_junk_of_weight_zero_changes_nothing(loss_fn, make, junk):
    params, batch = make()
    batch["weight"][2] = 0.0
    value, gradient = jax.value_and_grad(total(loss_fn, batch))(params)
    dirty = {name: array.copy() for name, array in batch.items()}
    for name, value_of_junk in junk.items():
        dirty[name][2] = value_of_junk
    dirty_value, dirty_gradient = jax.jit(jax.value_and_grad(total(loss_fn, dirty)))(params)
    assert np.isfinite(value)
    assert dirty_value == pytest.approx(float(value), rel=1e-6)
    np.testing.assert_allclose(dirty_gradient["w"], gradient["w"], rtol=1e-4, atol=1e-6)
    fewer = {name: np.delete(array, 2, 0) for name, array in batch.items()}
    assert total(loss_fn, fewer)(params) == pytest.approx(float(value), rel=1e-5)


def test_masked_targets_may_be_anything():
    params, batch = text()
    batch["mask"][1:3, 2:] = 0.0
    value, gradient = jax.value_and_grad(total(language_loss(linear()), batch))(params)
    batch["tokens"][1:3, -1] = -100
    again, regradient = jax.value_and_grad(total(language_loss(linear()), batch))(params)
    assert value == again
    np.testing.assert_array_equal(gradient["w"], regradient["w"])


@pytest.mark.parametrize("kind", ["mlp", "cnn", "gpt"])
def test_a_fully_masked_batch_is_finite_and_has_no_gradient(kind):
    shape, b = {"mlp": (5,), "cnn": (4, 4, 1), "gpt": (5,)}[kind], 3
    sizes = {"mlp": {}, "cnn": {"channels": [2]}, "gpt": {"layers": 1, "width": 8, "heads": 2}}
    model = build_model(kind, shape=shape, num_classes=7, **sizes[kind])
    params, state = model.init(jax.random.key(0))
    weight = jnp.zeros(b)
    if kind == "gpt":
        loss_fn, batch = language_loss(model), {"tokens": jnp.full((b, 6), 1 << 30)}
    else:
        inputs = jnp.full((b, *shape), jnp.nan)
        loss_fn, batch = classification_loss(model), {"inputs": inputs, "label": jnp.full(b, -1)}

    @jax.jit
    def value_and_grad(params):
        def loss(params):
            out = loss_fn(params, state, {**batch, "weight": weight}, None)
            return out.sum, out

        return jax.grad(loss, has_aux=True)(params)

    gradient, out = value_and_grad(params)
    assert out.sum == 0.0
    assert out.weight == 0.0
    assert all(part == 0.0 for pair in out.metrics.values() for part in pair)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_a_label_out_of_range_is_not_silent():
    params, batch = images()
    batch["label"][0] = C
    assert np.isnan(total(classification_loss(linear()), batch)(params))


def test_double_precision_is_kept():
    with jax.enable_x64(True):
        params, batch = images()
        out = classification_loss(linear())(
            {"w": jnp.asarray(params["w"], jnp.float64)}, {"calls": 0}, batch, None
        )
        assert out.sum.dtype == jnp.float64


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"'tokens'.*\['inputs', 'label', 'weight'\]"):
        language_loss(linear())({}, {}, images()[1], None)
    with pytest.raises(UserError, match=r"label_smoothing.*1\.5"):
        classification_loss(linear(), 1.5)

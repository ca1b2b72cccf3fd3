"""Optimizers against optax's own, schedules against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.errors import UserError
from jaxdp.optim import (
    OPTIMIZERS,
    build_optimizer,
    build_schedule,
    decay_mask,
    describe_decay,
    scale_by_step_schedule,
)

LR, WD = 0.01, 0.1


def l2(optimizer):
    return optax.chain(optax.add_decayed_weights(WD, decay_mask), optimizer)


# (kind, our options, the oracle); each with and without weight decay where that exists
CASES = [
    ("sgd", {}, optax.sgd(LR)),
    ("sgd", {"weight_decay": WD}, l2(optax.sgd(LR))),
    ("momentum", {"momentum": 0.8}, optax.sgd(LR, 0.8)),
    ("momentum", {"nesterov": True, "weight_decay": WD}, l2(optax.sgd(LR, 0.9, nesterov=True))),
    ("adam", {"b1": 0.8, "eps": 1e-6}, optax.adam(LR, 0.8, eps=1e-6)),
    ("adamw", {"b2": 0.95}, optax.adam(LR, b2=0.95)),
    ("adamw", {"weight_decay": WD}, optax.adamw(LR, weight_decay=WD, mask=decay_mask)),
    ("lion", {}, optax.lion(LR, weight_decay=0.0)),
    ("lion", {"weight_decay": WD, "b2": 0.9},
     optax.lion(LR, b2=0.9, weight_decay=WD, mask=decay_mask)),
    ("adafactor", {}, optax.adafactor(LR)),
    ("adafactor", {"weight_decay": WD, "min_dim_size_to_factor": 4},
     optax.adafactor(LR, 4, weight_decay_rate=LR * WD, weight_decay_mask=decay_mask)),
    ("adafactor", {"multiply_by_parameter_scale": False, "clipping_threshold": 2.0},
     optax.adafactor(LR, multiply_by_parameter_scale=False, clipping_threshold=2.0)),
]  # fmt: skip
IDS = [f"{kind}-{'-'.join(options)}" for kind, options, _ in CASES]


def random_params(dtype: str = "float32"):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (6, 8), "bias": (8,), "conv": (3, 3, 2, 4), "big": (130, 140)}
    return {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}


def random_grads(params, step):
    rng = np.random.default_rng(100 + step)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def test_every_optimizer_has_an_oracle():
    assert {kind for kind, _, _ in CASES} == OPTIMIZERS.keys()


@pytest.mark.parametrize(("kind", "options", "oracle"), CASES, ids=IDS)
def test_against_optax_compiled_once(kind, options, oracle):
    ours = build_optimizer(kind, learning_rate=LR, steps=10, **options)
    compiled = []

    @jax.jit
    def train(params, state, grads, step):
        compiled.append(True)
        updates, state = ours.update(grads, state, params, step=step)
        return optax.apply_updates(params, updates), state

    params = wanted = random_params()
    state, wanted_state = jax.jit(ours.init)(params), oracle.init(wanted)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(ours.init(params)))
    types = jax.tree.map(jax.typeof, state)
    for step in range(6):
        grads = random_grads(params, step)
        params, state = train(params, state, grads, jnp.int32(step))
        updates, wanted_state = oracle.update(grads, wanted_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, wanted
        )
    assert compiled == [True]
    assert jax.tree.map(jax.typeof, state) == types


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_updates_keep_the_dtype_of_the_params(kind, dtype):
    with jax.enable_x64(dtype == "float64"):
        optimizer = build_optimizer(kind, learning_rate=LR, steps=10, schedule="cosine")
        params = random_params(dtype)
        state = optimizer.init(params)
        for step in range(2):
            updates, state = optimizer.update(
                random_grads(params, step), state, params, step=jnp.int32(step)
            )
            assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
        assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates))


def test_a_skipped_step_advances_the_schedule_and_nothing_else():
    """Steps 0, 2, 3 of training are three updates of Adam, with the rates of 0, 2, 3."""
    ours = build_optimizer("adam", learning_rate=LR, steps=8, schedule="linear", warmup_steps=2)
    rate = build_schedule("linear", learning_rate=LR, steps=8, warmup_steps=2)
    adam = optax.scale_by_adam()
    params = random_params()
    state, adam_state = ours.init(params), adam.init(params)
    for step in (0, 2, 3):
        now = float(rate(step))
        grads = random_grads(params, step)
        updates, state = ours.update(grads, state, params, step=jnp.int32(step))
        wanted, adam_state = adam.update(grads, adam_state, params)
        jax.tree.map(
            lambda u, w, now=now: np.testing.assert_allclose(u, -now * w, rtol=1e-5),
            updates,
            wanted,
        )


def test_adafactor_is_sensible_on_small_matrices():
    """Nothing is factored below 128, a quadratic is solved, and zeros can be left."""
    optimizer = build_optimizer("adafactor", learning_rate=0.1, steps=300, schedule="linear")
    target = random_params()
    del target["big"]
    params = jax.tree.map(jnp.zeros_like, target)
    state = optimizer.init(params)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert {(6, 8), (3, 3, 2, 4)} <= shapes  # whole second moments

    @jax.jit
    def train(params, state, step):
        grads = jax.tree.map(jnp.subtract, params, target)
        updates, state = optimizer.update(grads, state, params, step=step)
        return optax.apply_updates(params, updates), state

    for step in range(300):
        params, state = train(params, state, jnp.int32(step))
    jax.tree.map(lambda p, t: np.testing.assert_allclose(p, t, atol=0.05), params, target)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedule_against_a_loop(schedule, warmup):
    end = 0.0 if schedule == "constant" else 0.1
    rate = build_schedule(
        schedule, learning_rate=0.5, steps=12, warmup_steps=warmup, end_fraction=end
    )
    for step in range(15):
        progress = min(1.0, (step - warmup) / (12 - warmup))
        left = {
            "constant": 1.0,
            "linear": 1.0 - progress * 0.9,
            "cosine": 0.1 + 0.9 * (1.0 + np.cos(np.pi * progress)) / 2.0,
        }[schedule]
        wanted = 0.5 * ((step + 1) / warmup if step < warmup else left)
        actual = jax.jit(rate)(jnp.int32(step))
        assert actual.dtype == jnp.float32
        assert actual.shape == ()
        assert actual == pytest.approx(wanted, rel=1e-5)
    assert rate(0) > 0.0
    assert rate(11) > 0.0


def test_the_product_with_the_rate_is_not_rounded_twice():
    link = scale_by_step_schedule(lambda step: jnp.float32(0.1))
    u = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.bfloat16)
    scaled, _ = link.update(u, link.init(u), step=0)
    exact = (-np.float32(0.1) * u.astype(np.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(scaled, exact)


def test_decay_is_described():
    params = {
        "blocks": {f"{i:02d}": {"qkv": {"kernel": jnp.ones((2, 6))}, "norm": {"scale": jnp.ones(2)}}
                   for i in range(3)},
        "embedding": jnp.ones((5, 2)),
    }  # fmt: skip
    assert describe_decay(params) == [
        "weight decay (46 values): blocks/*/qkv/kernel, embedding",
        "no weight decay (6 values): blocks/*/norm/scale",
    ]
    assert describe_decay({"bias": jnp.ones(3)})[0] == "weight decay (0 values): none"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "adm"}, ["'adm'", "sgd, momentum, adam, adamw, lion, adafactor"]),
        ({"beta1": 0.9}, ["beta1", "b1, b2, eps"]),
        ({"kind": "sgd", "momentum": 0.9}, ["momentum", "none"]),
        ({"weight_decay": 0.1}, ["adam takes no weight_decay", "adamw"]),
        ({"kind": "adamw", "weight_decay": -1.0}, ["weight_decay", "-1.0"]),
        ({"schedule": "cosin"}, ["'cosin'", "constant, linear, cosine"]),
        ({"learning_rate": 0.0}, ["learning_rate", "0.0"]),
        ({"warmup_steps": 10}, ["10 of 10 steps"]),
        ({"end_fraction": 0.1}, ["0.1", "no effect"]),
        ({"schedule": "linear", "end_fraction": 2.0}, ["end_fraction", "2.0"]),
    ],
)
def test_mistakes_are_named(changes, said):
    with pytest.raises(UserError) as caught:
        build_optimizer(**{"kind": "adam", "learning_rate": 0.1, "steps": 10, **changes})
    for words in said:
        assert words in str(caught.value)

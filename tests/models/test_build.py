"""Models as pure functions: shapes, counts, dtypes, randomness, gradients, mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.errors import UserError
from jaxdp.models import MODELS, build_model
from jaxdp.types import Model

# kind -> (arguments of build_model, parameters)
SMALL = {
    "mlp": (
        {"shape": (4, 3), "num_classes": 5, "hidden": [7, 6]},
        12 * 7 + 7 + 7 * 6 + 6 + 6 * 5 + 5,
    ),
    "cnn": (
        {"shape": (8, 8, 1), "num_classes": 5, "channels": [3, 4], "hidden": 6},
        9 * 3 + 3 + 27 * 4 + 4 + 16 * 6 + 6 + 6 * 5 + 5,
    ),
    "resnet": (  # stem, block, block with projection, logits
        {"shape": (8, 8, 1), "num_classes": 5, "channels": [3, 4], "batch_norm": "local"},
        33 + 2 * 87 + 116 + 152 + 20 + 25,
    ),
    "gpt": (
        {"shape": (6,), "num_classes": 11, "layers": 2, "width": 8, "heads": 2},
        11 * 8 + 6 * 8 + 2 * (8 * 24 + 8 * 8 + 2 * 8 * 32 + 2 * 8) + 8,
    ),
}


@functools.cache  # so that tests share what was compiled
def small(kind: str, **changes) -> Model:
    model = build_model(kind, **{**SMALL[kind][0], **changes})
    return Model(jax.jit(model.init), jax.jit(model.apply), model.weighted)


def inputs_of(kind: str, b: int) -> jax.Array:
    shape = (b, *SMALL[kind][0]["shape"])
    if kind == "gpt":
        return jax.random.randint(jax.random.key(5), shape, 0, 11)
    return jax.random.normal(jax.random.key(5), shape)


def keys_of(b: int) -> jax.Array:
    return jax.random.split(jax.random.key(9), b)


def cast(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def test_every_model_is_tested():
    assert SMALL.keys() == MODELS.keys()


@pytest.mark.parametrize("kind", SMALL)
def test_shapes_counts_and_plain_dicts(kind):
    params, state = small(kind).init(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == SMALL[kind][1]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert bool(state) == (kind == "resnet")

    def walk(tree):
        assert type(tree) is dict
        for name, value in tree.items():
            assert type(name) is str
            if not isinstance(value, jax.Array):
                walk(value)

    walk(params)
    walk(state)
    outputs, after = small(kind).apply(params, state, inputs_of(kind, 3), None)
    assert outputs.shape == ((3, 6, 11) if kind == "gpt" else (3, 5))
    jax.tree.map(np.testing.assert_array_equal, state, after)  # evaluation leaves it alone
    assert outputs.dtype == jnp.float32


@pytest.mark.parametrize("kind", SMALL)
def test_computes_in_the_dtype_of_its_params(kind):
    model = small(kind)
    params, state = model.init(jax.random.key(0))
    x = inputs_of(kind, 3)
    single, _ = model.apply(params, state, x, None)
    half, _ = model.apply(cast(params, jnp.bfloat16), state, x, None)
    assert half.dtype == jnp.float32
    scale = np.abs(single).max()
    assert 1e-5 * scale < np.abs(half - single).max() < 0.1 * scale
    (call,) = jax.make_jaxpr(model.apply)(cast(params, jnp.bfloat16), state, x, None).eqns
    products = [
        equation
        for equation in call.params["jaxpr"].eqns
        if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    assert len(products) >= 3
    assert all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars)
    with jax.enable_x64(True):
        double, _ = model.apply(cast(params, jnp.float64), state, x, None)
        own, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert double.dtype == jnp.float64
    np.testing.assert_allclose(double, single, atol=3e-6 * max(1.0, scale))
    assert {leaf.dtype for leaf in jax.tree.leaves(own)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind != "resnet"])
def test_outputs_of_an_example_do_not_depend_on_its_batch(kind):
    """With dropout, too: whether its batch is one of 8 or two of 4."""
    model = small(kind, dropout=0.3)
    params, _ = model.init(jax.random.key(0))
    x, keys = inputs_of(kind, 8), keys_of(8)
    whole, _ = model.apply(params, {}, x, keys)
    halves = [model.apply(params, {}, x[i : i + 4], keys[i : i + 4])[0] for i in (0, 4)]
    np.testing.assert_allclose(whole, jnp.concatenate(halves), rtol=1e-5, atol=1e-6)
    evaluated, _ = model.apply(params, {}, x, None)
    assert np.abs(whole - evaluated).max() > 1e-3


@pytest.mark.parametrize("kind", SMALL)
def test_gradient_against_finite_differences(kind):
    """In float64, along random directions."""
    model = small(kind)
    params, state = model.init(jax.random.key(0))
    with jax.enable_x64(True):
        # off the kinks: a residual block starts as relu(relu(x) + 0)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64) + 0.1, params)
        x = inputs_of(kind, 3)

        @jax.jit
        def loss(params):
            return jnp.sum(jnp.sin(model.apply(params, state, x, None)[0]))

        gradient = jax.jit(jax.grad(loss))(params)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            way = jax.tree.map(lambda leaf, rng=rng: rng.normal(size=leaf.shape), params)
            ahead, behind = (
                loss(jax.tree.map(lambda leaf, d, s=s: leaf + s * d, params, way))
                for s in (1e-6, -1e-6)
            )
            slope = jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, gradient, way))
            assert (ahead - behind) / 2e-6 == pytest.approx(float(slope), rel=1e-5, abs=1e-7)


def test_init_is_a_function_of_the_key():
    model = small("gpt")
    params, again, other = (model.init(jax.random.key(k))[0] for k in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert np.all(np.asarray(params["embedding"] != other["embedding"]))


def test_dense_layers_start_at_the_scale_of_their_inputs():
    params, _ = build_model("mlp", shape=(400,), num_classes=300, hidden=[500]).init(
        jax.random.key(0)
    )
    assert np.std(params["hidden"]["00"]["kernel"]) == pytest.approx(400**-0.5, rel=0.02)
    assert np.std(params["logits"]["kernel"]) == pytest.approx(500**-0.5, rel=0.02)
    assert not np.any(params["logits"]["bias"])


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("vgg", {}, ["'vgg'", "mlp, cnn, resnet, gpt"]),
        ("resnet", {"batch_norm": "global"}, ["'global'", "sync or local"]),
        ("resnet", {"shape": (8, 8)}, ["(8, 8)"]),
        ("mlp", {"hiden": [3]}, ["hiden", "hidden, dropout"]),
        ("mlp", {"dropout": 1.0}, ["dropout", "1.0"]),
        ("cnn", {"channels": [1, 1, 1, 1]}, ["8x8", "4 times", "at most 3"]),
        ("cnn", {"shape": (8, 8)}, ["(8, 8)"]),
        ("gpt", {"width": 10, "heads": 4}, ["width 10", "heads 4"]),
        ("gpt", {"width": 6, "positions": "rotary"}, ["6 / heads 2 = 3"]),
        ("gpt", {"positions": "sine"}, ["'sine'"]),
        ("gpt", {"shape": (3, 3)}, ["(3, 3)"]),
    ],
)
def test_mistakes_are_named(kind, changes, said):
    with pytest.raises(UserError) as caught:
        build_model(kind, **{**SMALL.get(kind, SMALL["mlp"])[0], **changes})
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "inputs", "said"),
    [
        ("cnn", jnp.ones((2, 8, 9, 1)), "[batch, 8, 8, 1], got [2, 8, 9, 1]"),
        ("mlp", jnp.ones((2, 12)), "[batch, 4, 3], got [2, 12]"),
        ("gpt", jnp.ones((2, 7), jnp.int32), "time <= 6], got shape [2, 7]"),
        ("gpt", jnp.ones((2, 6)), "integer tokens, got float32"),
    ],
)
def test_wrong_inputs_are_named(kind, inputs, said):
    model = small(kind)
    params, state = model.init(jax.random.key(0))
    with pytest.raises(UserError) as caught:
        model.apply(params, state, inputs, None)
    assert said in str(caught.value)

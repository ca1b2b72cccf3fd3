"""The order in which gradients become ready, held against the forward pass and the program."""

import re
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import all_reduce_sync, hlo, make_train_step
from jaxdp.models import build_model
from jaxdp.plan import as_planned, compare
from jaxdp.sync import ready_order
from jaxdp.trees import named_leaves

# model -> (shape, classes, options, its layers as the forward pass meets them)
GPT_BLOCK = ["norm_attention", "qkv", "attention_out", "norm_mlp", "mlp_in", "mlp_out"]
MODELS = {
    "mlp": ((5,), 3, {"hidden": (4, 6, 4)}, ["hidden/00", "hidden/01", "hidden/02", "logits"]),
    "cnn": (
        (8, 8, 1), 3, {"channels": (2, 3), "hidden": 4},
        ["convolutions/00", "convolutions/01", "hidden", "logits"],
    ),
    "resnet": (
        (4, 4, 1), 3, {"channels": (2, 4), "batch_norm": "local"},
        ["stem/convolution", "stem/norm", "blocks/0.0/first", "blocks/0.0/second",
         "blocks/1.0/first", "blocks/1.0/(second|projection)", "logits"],
    ),
    "gpt": (
        (6,), 11, {"layers": 2, "width": 8, "heads": 2},  # the embedding is the output layer too
        ["embedding", "positions", *(f"blocks/{i:02d}/{x}" for i in (0, 1) for x in GPT_BLOCK),
         "norm_out"],
    ),
}  # fmt: skip


def plain(loss):
    return loss


def in_bfloat16(loss):
    """Casts, whose transposes stand together at the end of the backward pass."""
    return lambda params: loss(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))


def gradient_jaxpr(kind, change, rng):
    """(jaxpr of the gradient, names of the parameters in JAX's order)."""
    shape, classes, options, _ = MODELS[kind]
    model = build_model(kind, shape=shape, num_classes=classes, **options)
    params, model_state = model.init(jax.random.key(int(rng.integers(99))))
    x = rng.normal(size=(2, *shape)).astype(np.float32)
    if kind == "gpt":
        x = rng.integers(0, classes, (2, *shape)).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 2)

    def loss(params):
        weight = (jnp.ones(2),) if model.weighted else ()
        logits, _ = model.apply(params, model_state, x, keys, *weight)
        return (logits**2).sum()

    jaxpr = jax.make_jaxpr(jax.grad(change(loss)))(params).jaxpr
    return jaxpr, [name for name, _ in named_leaves(params)]


def layers_of(kind, names):
    """The layers in the order in which `names` come to them."""
    found = []
    for name in names:
        [number] = [i for i, layer in enumerate(MODELS[kind][3]) if re.match(layer, name)]
        found.append(number)
    return [number for number, _ in groupby(found)]


@pytest.mark.parametrize("change", [plain, in_bfloat16, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("kind", MODELS)
def test_the_last_layer_is_ready_first(kind, change, rng):
    jaxpr, names = gradient_jaxpr(kind, change, rng)
    layers = layers_of(kind, [names[i] for i in ready_order(jaxpr)])
    backwards = list(reversed(range(len(MODELS[kind][3]))))
    if kind == "gpt":  # positions and embedding: added to each other, ready in the same breath
        assert sorted(layers[-2:]) == [0, 1]
        layers[-2:] = backwards[-2:]
    assert layers == backwards


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_order_in_which_the_program_is_written(kind, rng):
    jaxpr, names = gradient_jaxpr(kind, plain, rng)
    written = {v: k for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    positions = [written[v] for v in jaxpr.outvars]
    orders = (sorted(range(len(names)), key=positions.__getitem__), ready_order(jaxpr))
    by_position, by_depth = (layers_of(kind, [names[i] for i in order]) for order in orders)
    same = slice(-2) if kind == "gpt" else slice(None)
    assert by_depth[same] == by_position[same]


def test_what_is_ready_together_keeps_the_reverse_of_its_order():
    def loops(x):
        def body(carry, _):
            return (carry[0] + 1, jnp.sin(jnp.sin(carry[1]))), None

        return jax.lax.scan(body, (x, x), None, 3)[0]

    assert ready_order(jax.make_jaxpr(loops)(1.0).jaxpr) == (1, 0)
    assert ready_order(jax.make_jaxpr(lambda x: (x + 1, x, 2.0))(1.0).jaxpr) == (2, 1, 0)


# the first layer is called z, the last one a: the order of names is that of the backward pass
SIZES = {"z": (4, 8), "m": (8, 16), "a": (16, 3)}


def backwards_named(params, model_state, batch, keys):
    h = jnp.tanh(jnp.tanh(batch["x"] @ params["z"]) @ params["m"]) @ params["a"]
    return (h**2).sum(), jnp.float32(len(h))


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize(("microbatches", "order"), [(1, "amz"), (2, "zma")])
def test_a_steps_buckets_are_in_that_order(microbatches, order, wire, mesh_of, rng):
    sync = all_reduce_sync("ring", bucket_bytes=1, wire=wire)  # a bucket per leaf
    step = make_train_step(
        backwards_named, optax.sgd(0.1), sync, mesh_of(2), microbatches=microbatches
    )
    params = {name: rng.normal(size=size).astype(np.float32) for name, size in SIZES.items()}
    state, batch = step.init(params), step.place({"x": rng.normal(size=(8, 4)).astype(np.float32)})
    plan, itemsize = step.plan(state, batch), 4 if wire == "float32" else 2
    assert plan is not None
    sizes = [np.prod(SIZES[name]) * itemsize for name in order]
    sizes[0] += 2 * 4  # loss and weight ride with the first
    assert [planned.sent_bytes for planned in plan.collectives] == sizes
    found = hlo.collectives(step.run.lower(state, batch).compile().as_text())
    assert as_planned(plan, found), compare(plan, found)

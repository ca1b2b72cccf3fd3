"""A small training whose every part communicates: model state, metrics, unequal weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxdp import LossOut, make_train_step, on_mesh
from jaxdp.mesh import AXIS

BATCH, WIDTH, CLASSES = 96, 13, 5
SHAPES = {"a": (WIDTH, 37), "b": (37,), "c": (37, 23), "d": (23, CLASSES), "e": (CLASSES,)}


def loss(params, model_state, batch, keys):
    """A three-layer network with weights per example, a metric and a running mean."""
    hidden = jnp.tanh(batch["x"].astype(params["a"].dtype) @ params["a"] + params["b"][None])
    logits = jnp.tanh(hidden @ params["c"]) @ params["d"] + params["e"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    weight = batch["weight"].astype(losses.dtype)
    correct = (logits.argmax(-1) == batch["y"]) * weight
    seen = jax.tree.map(lambda s: 0.9 * s + 0.1 * batch["x"].astype(s.dtype).mean(0), model_state)
    accuracy = (correct.sum(), weight.sum())
    return LossOut((losses * weight).sum(), weight.sum(), {"accuracy": accuracy}, seen)


@pytest.fixture
def batches(rng):
    """count, dtype -> random batches with unequal weights, many of them 0."""

    def make(count, dtype=np.float32):
        return [
            {
                "x": rng.normal(size=(BATCH, WIDTH)).astype(dtype),
                "y": rng.integers(0, CLASSES, BATCH).astype(np.int32),
                "weight": (rng.integers(0, 4, BATCH) * (rng.random(BATCH) < 0.7)).astype(dtype),
            }
            for _ in range(count)
        ]

    return make


@pytest.fixture
def params(rng):
    """dtype -> random parameters."""
    return lambda dtype=np.float32: {
        name: (rng.normal(size=shape) / 3).astype(dtype) for name, shape in SHAPES.items()
    }


@pytest.fixture
def begun(mesh_of):
    """(sync, n, params, options of the step) -> (step, state before step 0)."""

    def begin(sync, n, params, **options):
        step = make_train_step(loss, optax.sgd(0.1), sync, mesh_of(n), **options)
        return step, step.init(params, {"seen": np.zeros(WIDTH, params["a"].dtype)})

    return begin


@pytest.fixture
def trained(begun):
    """(sync, n, params, batches, options of the step) -> (state, rows of metrics).

    Replicas are compared to the bit at the end.
    """

    def run(sync, n, params, batches, **options):
        (step, state), rows = begun(sync, n, params, **options), []
        for batch in batches:
            state, metrics = step(state, step.place(batch))
            rows.append({name: float(value) for name, value in metrics.items()})
        for leaf in jax.tree.leaves((state.params, state.opt_state, state.model_state)):
            first, *others = (np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
            assert all(other == first for other in others)
        return state, rows

    return run


@pytest.fixture
def compiled(begun):
    """(sync, n, params, batch, options) -> (plan, text of the compiled step)."""

    def run(sync, n, params, batch, **options):
        step, state = begun(sync, n, params, **options)
        placed = step.place(batch)
        return step.plan(state, placed), step.run.lower(state, placed).compile().as_text()

    return run


@pytest.fixture
def synced(mesh_of):
    """(sync, n) -> (grads `[n, ...]`, weight, states `[n, ...]`) -> (sums, states) of every device.

    `blank(params)` of it: the states before the first step.
    """

    def on(sync, n):
        def body(sums, state):
            mine = jax.tree.map(lambda x: x[0], (sums, state))
            return jax.tree.map(lambda x: x[None], sync.update(*mine, AXIS))

        run = jax.jit(on_mesh(body, mesh_of(n), P(AXIS), P(AXIS)))

        def update(grads, weight, state):
            pairs = np.full((n, 2), weight / n, jax.tree.leaves(grads)[0].dtype)
            sums = {"grads": grads, "scalars": {"loss": pairs}, "model_state": {}}
            summed, state = jax.device_get(run(sums, state))
            for leaf in jax.tree.leaves(summed):
                assert all(row.tobytes() == leaf[0].tobytes() for row in leaf), "replicas differ"
            return jax.tree.map(lambda x: x[0], summed["grads"]), state

        def blank(params):
            return jax.tree.map(lambda x: np.stack([np.asarray(x)] * n), sync.init(params))

        update.blank = blank
        return update

    return on

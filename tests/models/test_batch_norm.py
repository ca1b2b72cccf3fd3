"""Batch norm over devices: one device with the same microbatches, or each device's own (V14)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxdp import all_reduce_sync, hlo, make_eval_step, make_train_step
from jaxdp.errors import UserError
from jaxdp.evaluation import evaluate
from jaxdp.losses import classification_loss
from jaxdp.mesh import AXIS, on_mesh
from jaxdp.models import build_model
from jaxdp.models.batch_norm import moments

BATCH, SHAPE, CLASSES = 48, (6, 6, 2), 3


def model_of(mode):
    return build_model("resnet", shape=SHAPE, num_classes=CLASSES, channels=[3, 4], batch_norm=mode)


def batch_of(rng, dtype=np.float32):
    """Random examples far from mean 0; a third of the weights are 0, and what is there is NaN."""
    weight = rng.integers(0, 3, BATCH).astype(dtype)
    inputs = (5 + rng.normal(size=(BATCH, *SHAPE))).astype(dtype)
    inputs[weight == 0] = np.nan
    label = rng.integers(0, CLASSES, BATCH).astype(np.int32)
    return {"inputs": inputs, "label": label, "weight": weight}


def start(mode, dtype):
    params, state = model_of(mode).init(jax.random.key(0))
    # scales of 0 would hide a block's gradients
    params = jax.tree.map(lambda x: x + 0.1, params)
    return jax.tree.map(lambda x: np.asarray(x, dtype), (params, state))


def train(mesh, mode, batches, dtype, microbatches=1, algorithm="psum"):
    step = make_train_step(
        classification_loss(model_of(mode)),
        optax.sgd(0.05),
        all_reduce_sync(algorithm),
        mesh,
        microbatches=microbatches,
    )
    state = step.init(*start(mode, dtype))
    for batch in batches:
        state, metrics = step(state, step.place(batch))
    assert np.isfinite(float(metrics["loss"]))
    for leaf in jax.tree.leaves((state.params, state.model_state)):
        first, *others = (np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
        assert all(first == other for other in others)
    return jax.device_get((state.params, state.model_state))


def deviation(one, other, start):
    def of_leaf(a, b, before):
        return np.linalg.norm(a - b) / np.linalg.norm(a - before)

    return max(jax.tree.leaves(jax.tree.map(of_leaf, one, other, start)))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_v14_sync_is_one_device_with_the_same_microbatches(microbatches, mesh_of, rng, few):
    with jax.enable_x64(True):
        batches = [batch_of(rng, np.float64) for _ in range(5)]
        one = train(mesh_of(1), "sync", batches, np.float64, microbatches)
        for n, algorithm in few([(2, "psum"), (3, "ring"), (4, "psum"), (6, "psum")], 1):
            many = train(mesh_of(n), "sync", batches, np.float64, microbatches, algorithm)
            assert deviation(one, many, start("sync", np.float64)) <= 1e-11, n


def test_v14_local_is_another_algorithm_and_is_merged(mesh_of, rng):
    with jax.enable_x64(True):
        batch = batch_of(rng, np.float64)
        one = train(mesh_of(1), "local", [batch], np.float64)
        many = train(mesh_of(4), "local", [batch], np.float64)
        assert deviation(one, many, start("local", np.float64)) > 1e-3
        # what each quarter of the batch does to the averages, on a device of its own
        quarters = [
            {name: x[i : i + BATCH // 4] for name, x in batch.items()}
            for i in range(0, BATCH, BATCH // 4)
        ]
        alone = [train(mesh_of(1), "local", [q], np.float64)[1] for q in quarters]
        weights = [q["weight"].sum() for q in quarters]
        merged = jax.tree.map(lambda *x: np.average(x, axis=0, weights=weights), *alone)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), merged, many[1])


def test_v14_evaluation_is_the_same_for_every_n(mesh_of, rng):
    params, state = train(mesh_of(4), "sync", [batch_of(rng) for _ in range(3)], np.float32)
    batch = batch_of(rng)
    found = [
        evaluate(
            make_eval_step(classification_loss(model_of("sync")), mesh_of(n)),
            params,
            state,
            [batch],
        )
        for n in (1, 2, 8)
    ]
    for one in found:
        assert (one["weight"], one["accuracy"]) == (found[0]["weight"], found[0]["accuracy"])
        assert one["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)


def test_moments_against_numpy(mesh_of, rng):
    x = 100 + rng.normal(size=(24, 5, 3))
    used = (rng.random(24) < 0.6).astype(np.float64)
    kept = x[used > 0].reshape(-1, 3)

    def body(x, used):
        return moments(x, used, "sync")

    with jax.enable_x64(True):
        for n in (1, 3, 8):
            run = jax.jit(on_mesh(body, mesh_of(n), (P(AXIS), P(AXIS)), P()))
            count, mean, variance = run(x, used)
            assert count == len(kept)
            np.testing.assert_allclose(mean, kept.mean(0), rtol=1e-13)
            np.testing.assert_allclose(variance, kept.var(0), rtol=1e-9)
        count, mean, variance = run(x, np.zeros(24))
        assert count == 0
        assert not np.any(mean)
        assert not np.any(variance)


def test_the_gradient_goes_through_every_devices_loss(mesh_of, rng):
    """Against one device: d(sum of all losses)/dx, also through the statistics."""
    x, target = rng.normal(size=(24, 4, 3)), rng.normal(size=(24, 4, 3))

    def loss(x, target, mode):
        _, mean, variance = moments(x, jnp.ones(len(x), x.dtype), mode)
        y = (x - mean[None, None]) * jax.lax.rsqrt(variance + 1e-5)[None, None]
        return jnp.sum(y * target)

    with jax.enable_x64(True):
        whole = jax.grad(loss)(jnp.asarray(x), target, "local")
        for n in (2, 3, 8):
            body = on_mesh(
                lambda x, t: jax.grad(loss)(x, t, "sync"), mesh_of(n), (P(AXIS), P(AXIS)), P(AXIS)
            )
            np.testing.assert_allclose(jax.jit(body)(x, target), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("mode", "per_layer"), [("sync", 2), ("local", 0)])
def test_law_3_its_collectives_are_known(mode, per_layer, mesh_of, rng):
    """One small all-reduce per layer and direction, and the one of the gradients."""
    layers = 1 + 2 + 3  # stem, block, block with projection
    loss, mesh = classification_loss(model_of(mode)), mesh_of(4)
    step = make_train_step(loss, optax.sgd(0.1), all_reduce_sync(), mesh)
    state, batch = step.init(*start(mode, np.float32)), step.place(batch_of(rng))
    found = hlo.collectives(step.run.lower(state, batch).compile().as_text())
    assert {c.kind for c in found} == {"all-reduce"}
    statistics = 4 * sum(2 * features + 1 for features in (3, 3, 3, 4, 4, 4)) * per_layer
    leaves = jax.tree.leaves(start(mode, np.float32))
    scalars = 4 * 2 * 2  # sum and weight of loss and accuracy
    twice = 4 * 4  # a block's and its projection's last bias: one gradient, sent once
    rest = scalars - twice + sum(x.nbytes for x in leaves)
    assert sum(c.result_bytes for c in found) == statistics + rest
    # the compiler may join those of a block's first convolution and of its projection
    assert layers * per_layer - 2 <= len(found) - 1 <= layers * per_layer or per_layer == 0


def test_other_collectives_in_a_loss_stay_refused(mesh_of, rng):
    inner = classification_loss(model_of("sync"))

    def loss(params, model_state, batch, keys):
        out = inner(params, model_state, batch, keys)
        return out._replace(sum=jax.lax.pmean(out.sum, AXIS))

    step = make_train_step(loss, optax.sgd(0.1), all_reduce_sync(), mesh_of(2))
    state = step.init(*start("sync", np.float32))
    with pytest.raises(UserError, match="calls the collective psum"):
        step(state, step.place(batch_of(rng)))

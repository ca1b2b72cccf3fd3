"""Parameters that are kept in 16 bits: their gradients are summed and divided in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import LossOut, all_reduce_sync, hlo, make_train_step
from jaxdp.plan import as_planned
from jaxdp.steps.local_sgd import make_local_sgd_step
from jaxdp.steps.reproducible import make_reproducible_step
from jaxdp.sync import sharded_sync
from jaxdp.sync.top_k import top_k_sync

N, RATE = 4, 0.125


def plain(loss, optimizer, mesh, **options):
    return make_train_step(loss, optimizer, all_reduce_sync("ring"), mesh, **options)


def zero(loss, optimizer, mesh, **options):
    return make_train_step(loss, optimizer, sharded_sync("ring"), mesh, **options)


def compressed(loss, optimizer, mesh, **options):
    return make_train_step(loss, optimizer, top_k_sync(1.0), mesh, **options)


def local(loss, optimizer, mesh, **options):
    return make_local_sgd_step(loss, optimizer, all_reduce_sync(), mesh, local_steps=1, **options)


def reproducible(loss, optimizer, mesh, **options):
    return make_reproducible_step(loss, optimizer, mesh, logical_shards=N, **options)


BUILDERS = [plain, zero, compressed, local, reproducible]


def linear(params, model_state, batch, keys):
    """The gradient of w is the sum of g, and the state the weighted mean of g."""
    w = params["w"].astype(jnp.float32)
    g, weight = batch["g"], batch["weight"].sum()
    state = {"mean": (g.sum() / weight).astype(model_state["mean"].dtype)[None]}
    return LossOut((w * g.sum()).sum(), weight, {}, state)


def begun(builder, optimizer, mesh, dtype, **options):
    step = builder(linear, optimizer, mesh, **options)
    return step, step.init({"w": np.zeros(3, dtype)}, {"mean": np.zeros(1, dtype)})


def dtypes(state):
    return jax.tree.map(lambda x: x.dtype, state)


# in between local SGD keeps each device's parameters in bfloat16, and so rounds
@pytest.mark.parametrize("builder", [b for b in BUILDERS if b is not local])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_bfloat16_cannot_add(builder, microbatches, mesh_of):
    # 256 + 1 is 256 in bfloat16
    g = np.array([256, 0, 1, 0, 1, 0, 1, 0], np.float32)
    batch = {"g": g, "weight": np.ones(8, np.float32)}
    step, state = begun(
        builder, optax.sgd(RATE), mesh_of(N), jnp.bfloat16, microbatches=microbatches
    )
    state, metrics = step(state, step.place(batch))
    mean = g.sum() / 8
    assert float(metrics["grad_norm"]) == pytest.approx(mean * np.sqrt(3))
    wanted = jnp.full(3, -RATE * mean, jnp.bfloat16)
    np.testing.assert_array_equal(state.params["w"], wanted)


@pytest.mark.parametrize("builder", BUILDERS)
def test_more_weight_than_float16_can_hold(builder, mesh_of, rng):
    weight = rng.integers(8_000, 16_000, 8).astype(np.float32)
    g = rng.integers(-4_000, 4_000, 8).astype(np.float32)
    assert weight.sum() > 65_504
    step, state = begun(builder, optax.sgd(1.0), mesh_of(N), np.float16)
    state, metrics = step(state, step.place({"g": g, "weight": weight}))
    assert metrics["weight"] == weight.sum()
    assert metrics["nonfinite"] == 0
    mean = g.sum() / weight.sum()
    np.testing.assert_allclose(state.params["w"], np.full(3, -mean), rtol=1e-3, atol=5e-4)
    np.testing.assert_allclose(state.model_state["mean"], [mean], rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_the_state_keeps_its_dtypes_and_the_step_its_program(builder, dtype, mesh_of, rng):
    step, state = begun(builder, optax.adam(0.01), mesh_of(N), dtype, clip_norm=1.0)
    before = dtypes(state)
    assert before.params["w"] == before.model_state["mean"] == dtype
    for _ in range(3):
        batch = {"g": rng.normal(size=8).astype(np.float32), "weight": np.ones(8, np.float32)}
        state, _ = step(state, step.place(batch))
        assert dtypes(state) == before
    if builder is not reproducible:
        assert step.run._cache_size() == 1
        placed = step.place(batch)
        found = hlo.collectives(step.run.lower(state, placed).compile().as_text())
        assert as_planned(step.plan(state, placed), found)

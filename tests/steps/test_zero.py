"""ZeRO-1 against the plain update: the same training, in 1/N of the optimizer's memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import LossOut, all_reduce_sync, hlo, make_train_step
from jaxdp.checkpoints import Checkpoints
from jaxdp.collectives import algorithms_for
from jaxdp.errors import UserError
from jaxdp.freeze import freeze
from jaxdp.loss_scale import DynamicScale
from jaxdp.optim import build_optimizer
from jaxdp.plan import as_planned
from jaxdp.sync import sharded_sync
from jaxdp.sync.sharded import share_length
from jaxdp.trees import bytes_per_device, count_bytes

BATCH, WIDTH = 96, 7
ALGORITHMS = algorithms_for("reduce_scatter")
# odd sizes, a leaf smaller than the number of devices, a scalar, one that is frozen
SHAPES = {"a": (WIDTH, 11), "b": (11,), "c": (11, 3), "frozen": (3, 3), "s": (), "tiny": (1, 2)}


def loss(params, model_state, batch, keys):
    hidden = jnp.tanh(batch["x"].astype(params["a"].dtype) @ params["a"] + params["b"][None])
    out = (hidden @ params["c"]) @ params["frozen"] * params["s"] + params["tiny"].sum()
    weight = batch["weight"].astype(out.dtype)
    total = (jnp.square(out - 1).sum(1) * weight).sum()
    state = jax.tree.map(lambda s: 0.9 * s + 0.1 * hidden.mean(0).astype(s.dtype), model_state)
    return LossOut(total, weight.sum(), {"size": (jnp.abs(out).sum(), weight.sum())}, state)


def optimizer(kind="adamw"):
    decay = {} if kind == "adam" else {"weight_decay": 0.1}
    return build_optimizer(kind, learning_rate=0.05, steps=9, **decay)


def parameters(rng, dtype):
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def batches(rng, dtype, count):
    return [
        {
            "x": rng.normal(size=(BATCH, WIDTH)).astype(dtype),
            "weight": (rng.integers(0, 4, BATCH) * (rng.random(BATCH) < 0.7)).astype(dtype),
        }
        for _ in range(count)
    ]


def begun(sync, mesh, params, kind="adamw", **options):
    options = {"clip_norm": 0.5, "frozen": freeze(["froz*"])} | options
    step = make_train_step(loss, optimizer(kind), sync, mesh, **options)
    return step, step.init(params, {"mean": np.zeros(11, params["a"].dtype)})


def run(step, state, batches):
    for batch in batches:
        state, metrics = step(state, step.place(batch))
        for leaf in jax.tree.leaves((state.params, state.model_state)):
            first, *others = (np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
            assert all(first == other for other in others)
    return state, metrics


@pytest.mark.parametrize(
    ("kind", "x64"), [("adamw", True), ("adamw", False), ("lion", True), ("momentum", True)]
)
def test_law_1_one_devices_training(kind, x64, mesh_of, rng, few):
    dtype = np.float64 if x64 else np.float32
    with jax.enable_x64(x64):
        params, data = parameters(rng, dtype), batches(rng, dtype, 4)
        one, seen = run(*begun(all_reduce_sync(), mesh_of(1), params, kind), data)
        for n, algorithm in few([(n, a) for n in (1, 2, 3, 4, 8) for a in ALGORITHMS], 1):
            if n != 3 or algorithm != "halving_doubling":  # of powers of two
                zero = sharded_sync(algorithm)
                many, metrics = run(*begun(zero, mesh_of(n), params, kind, microbatches=4), data)
                for name in SHAPES:
                    a, b = np.asarray(one.params[name]), np.asarray(many.params[name])
                    off = np.linalg.norm(a - b) / np.linalg.norm(a)
                    assert off <= (1e-11 if x64 else 1e-4), (name, n, algorithm)
                np.testing.assert_allclose(metrics["loss"], seen["loss"], rtol=1e-4)
                np.testing.assert_allclose(metrics["grad_norm"], seen["grad_norm"], rtol=1e-3)
                np.testing.assert_array_equal(many.params["frozen"], params["frozen"])
                assert not np.array_equal(many.params["a"], params["a"])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_law_3_planned_is_found(algorithm, wire, mesh_of, rng, few):
    params, data = parameters(rng, np.float32), batches(rng, np.float32, 1)
    for n in few((2, 4, 8) if algorithm == "halving_doubling" else (2, 3, 4, 8), 1):
        step, state = begun(sharded_sync(algorithm, wire), mesh_of(n), params)
        placed = step.place(data[0])
        found = hlo.collectives(step.run.lower(state, placed).compile().as_text())
        plan = step.plan(state, placed)
        assert as_planned(plan, found), (plan, found)
        # reduce-scatter and all-gather send (N - 1) / N of the leaves each, as an all-reduce does
        shared = [np.prod(s) for name, s in SHAPES.items() if s and name != "frozen"]
        part = 4 * sum(share_length(int(size), n) for size in shared)
        if wire == "float32" and algorithm in ("psum", "ring"):
            sent = {"gradients": 0, "parameters": 0}
            for one in plan.collectives:
                if one.name in sent:
                    sent[one.name] += one.sent_bytes
            assert sent == {"gradients": (n - 1) * part, "parameters": (n - 1) * part}


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_a_narrow_wire_is_near_and_replicas_are_equal(wire, mesh_of, rng):
    params, data = parameters(rng, np.float32), batches(rng, np.float32, 3)
    exact, _ = run(*begun(all_reduce_sync(), mesh_of(1), params, "momentum"), data)
    narrow, _ = run(*begun(sharded_sync("psum", wire), mesh_of(4), params, "momentum"), data)
    off = np.linalg.norm(np.asarray(exact.params["a"]) - np.asarray(narrow.params["a"]))
    assert 0 < off / np.linalg.norm(exact.params["a"]) < 2e-2


def test_each_device_holds_its_share_of_the_optimizer(mesh_of, rng):
    params = parameters(rng, np.float32) | {"a": np.zeros((WIDTH, 1100), np.float32)}
    whole = count_bytes(begun(all_reduce_sync(), mesh_of(1), params)[1].opt_state)
    for n in (1, 2, 4, 8):
        _, state = begun(sharded_sync(), mesh_of(n), params)
        assert bytes_per_device(state.opt_state) == pytest.approx(whole / n, rel=0.02)


@pytest.mark.parametrize("fault", [np.nan, "empty"])
def test_a_step_that_does_not_count_leaves_the_shares_alone(fault, mesh_of, rng):
    params, [batch, bad] = parameters(rng, np.float32), batches(rng, np.float32, 2)
    bad = {name: x.copy() for name, x in bad.items()}
    if fault == "empty":
        bad["weight"][:] = 0
    else:
        bad["x"][17], bad["weight"][17] = fault, 1
    step, state = begun(sharded_sync("ring"), mesh_of(4), params)
    state, _ = run(step, state, [batch])
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = run(step, state, [bad])
    jax.tree.map(
        np.testing.assert_array_equal, before, jax.device_get((state.params, state.opt_state))
    )
    assert metrics["skipped" if fault == "empty" else "nonfinite"] == 1


def test_float16_with_its_loss_scale(mesh_of, rng):
    params, data = parameters(rng, np.float32), batches(rng, np.float32, 6)
    half = {"compute_dtype": "float16", "loss_scale": DynamicScale(initial=2.0**14)}
    step, state = begun(sharded_sync(), mesh_of(4), params, **half)
    plain, other = begun(all_reduce_sync(), mesh_of(4), params, **half)
    state, metrics = run(step, state, data)
    other, expected = run(plain, other, data)
    assert metrics["loss_scale"] == expected["loss_scale"] < 2.0**14
    assert metrics["overflows"] == expected["overflows"] > 0
    np.testing.assert_allclose(state.params["a"], other.params["a"], rtol=1e-3, atol=1e-3)


def test_checkpoints_go_between_plain_and_sharded(mesh_of, rng, tmp_path):
    params, data = parameters(rng, np.float32), batches(rng, np.float32, 4)
    steps = [
        begun(sharded_sync(), mesh_of(4), params),
        begun(all_reduce_sync(), mesh_of(2), params),
        begun(sharded_sync("ring"), mesh_of(3), params),
    ]
    step, state = steps[0]
    state, _ = run(step, state, data[:1])
    for k, (other, like) in enumerate(steps[1:]):
        with Checkpoints(tmp_path / str(k), form=step.form) as saved:
            saved.save(1, state)
        with Checkpoints(tmp_path / str(k), form=other.form) as saved:
            after, _, lines = saved.restore(like)
        assert not lines
        a, b = step.form.saved(state), other.form.saved(after)
        assert jax.tree.structure(a) == jax.tree.structure(b)
        jax.tree.map(np.testing.assert_array_equal, *jax.device_get((a, b)))
        assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, like)
        assert np.any(jax.tree.leaves(jax.device_get(b.opt_state))[1])  # moments, not zeros
        step, state = other, after
    run(step, state, data[1:])  # and the training goes on


def test_resumed_is_the_straight_run_to_the_bit(mesh_of, rng, tmp_path):
    params, data = parameters(rng, np.float32), batches(rng, np.float32, 4)
    step, state = begun(sharded_sync(), mesh_of(4), params)
    state, _ = run(step, state, data[:2])
    with Checkpoints(tmp_path, form=step.form) as saved:
        saved.save(2, state)
        straight, _ = run(step, state, data[2:])
        again, _, _ = saved.restore(step.init(params, {"mean": np.zeros(11, np.float32)}))
    resumed, _ = run(step, again, data[2:])
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((straight, resumed)))


@pytest.mark.parametrize("algorithm", ["tree", "recursive_doubling", "auto", "rign"])
def test_algorithms_without_a_reduce_scatter_are_refused(algorithm):
    with pytest.raises(UserError, match=algorithm):
        sharded_sync(algorithm)


def test_int8_is_added_after_decoding_only():
    with pytest.raises(UserError, match="psum or all_to_all"):
        sharded_sync("ring", "int8")


WHOLE_LEAF = {
    "adafactor": optax.adafactor(1e-3),
    "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "lamb": optax.lamb(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "a clip": optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(0.1)),
    "block clip": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
}


@pytest.mark.parametrize("name", WHOLE_LEAF)
def test_optimizers_that_see_whole_leaves_are_refused(name, mesh_of, rng):
    step = make_train_step(loss, WHOLE_LEAF[name], sharded_sync(), mesh_of(2))
    with pytest.raises(UserError, match="element by element"):
        step.init(parameters(rng, np.float32))


ELEMENTWISE = {
    "adam": optax.adam(1e-3),
    "masked decay": optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "amsgrad": optax.amsgrad(1e-3),
    "clip by value": optax.chain(optax.clip(0.1), optax.rmsprop(1e-2, momentum=0.9)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "by label": optax.partition(
        {"big": optax.adam(1e-3), "small": optax.sgd(0.1)},
        {name: "big" if len(shape) > 1 else "small" for name, shape in SHAPES.items()},
    ),
}


def test_users_optimizers_that_are_elementwise(mesh_of, rng, few):
    params, data = parameters(rng, np.float32), batches(rng, np.float32, 3)
    for name in ELEMENTWISE:  # none is refused
        make_train_step(loss, ELEMENTWISE[name], sharded_sync(), mesh_of(3)).init(params)
    for name in few(ELEMENTWISE, 3):
        found = []
        for sync, n in ((all_reduce_sync(), 1), (sharded_sync(), 3)):
            step = make_train_step(loss, ELEMENTWISE[name], sync, mesh_of(n))
            state = step.init(params, {"mean": np.zeros(11, np.float32)})
            found.append(jax.device_get(run(step, state, data)[0].params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *found)


def test_an_algorithm_of_powers_of_two_is_refused_before_the_first_step(mesh_of, rng):
    with pytest.raises(UserError, match=r"halving_doubling.*power of two"):
        begun(sharded_sync("halving_doubling"), mesh_of(3), parameters(rng, np.float32))

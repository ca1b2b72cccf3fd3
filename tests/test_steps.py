"""The training step against one device and against closed forms."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import LossOut, all_reduce_sync, hlo, make_train_step
from jaxdp.collectives import ALGORITHMS
from jaxdp.errors import UserError

BATCH, WIDTH, CLASSES = 96, 13, 5
# the compiler's, one that computes once and copies, one that computes redundantly; all the others
# are held to the same by their own tests, and here with one random number of devices
CORE = ("psum", "ring", "recursive_doubling")


def linear_loss(params, model_state, batch, keys):
    """Gradient with respect to w: the sum of the examples' own numbers."""
    return (params["w"] * batch["g"]).sum(), jnp.float32(batch["g"].shape[0])


def net_loss(params, model_state, batch, keys):
    """A two-layer network with weights per example and dropout from the example's own key."""
    hidden = jnp.tanh(batch["x"].astype(params["a"].dtype) @ params["a"] + params["b"][None])
    if keys is not None:
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, hidden.shape[1:]))(keys)
        hidden = jnp.where(kept, hidden / 0.8, 0)
    logits = hidden @ params["c"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    weight = batch["weight"].astype(losses.dtype)
    correct = (logits.argmax(-1) == batch["y"]) * weight
    accuracy = (correct.sum(), weight.sum())
    return LossOut((losses * weight).sum(), weight.sum(), {"accuracy": accuracy})


def net_params(rng, dtype=np.float32):
    shapes = {"a": (WIDTH, 17), "b": (17,), "c": (17, CLASSES)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def net_batch(rng, dtype=np.float32):
    """Random examples with unequal weights, many of them 0."""
    weight = rng.integers(0, 4, BATCH) * (rng.random(BATCH) < 0.7)
    return {
        "x": rng.normal(size=(BATCH, WIDTH)).astype(dtype),
        "y": rng.integers(0, CLASSES, BATCH).astype(np.int32),
        "weight": weight.astype(dtype),
    }


def train(mesh, batches, params, algorithm="psum", loss=net_loss, optimizer=None, **options):
    step = make_train_step(
        loss, optimizer or optax.sgd(0.1), all_reduce_sync(algorithm), mesh, **options
    )
    state = step.init(params)
    rows = []
    for batch in batches:
        state, metrics = step(state, step.place(batch))
        rows.append({name: float(value) for name, value in metrics.items()})
    return state, rows


def replicas(tree):
    """The tree as each device holds it."""
    leaves, structure = jax.tree.flatten(tree)
    shards = zip(
        *([shard.data for shard in leaf.addressable_shards] for leaf in leaves), strict=True
    )
    return [jax.tree.unflatten(structure, jax.device_get(copy)) for copy in shards]


def assert_replicas_equal(tree):
    first, *others = replicas(tree)
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), first, other)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_v1_two_gradients_and_their_mean(algorithm, mesh_of, rng, few):
    for n in (2, *few(range(3, 10), 1)):
        check_mean(algorithm, n, mesh_of, rng)


def check_mean(algorithm, n, mesh_of, rng):
    gradients = np.array([2, 4] if n == 2 else rng.integers(-9, 9, n), np.float32)
    state, [metrics] = train(
        mesh_of(n), [{"g": gradients}], {"w": np.float32(5)}, algorithm, linear_loss
    )
    np.testing.assert_allclose(state.params["w"], 5 - 0.1 * gradients.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], abs(gradients.mean()), rtol=1e-6)
    if n == 2:
        np.testing.assert_allclose(state.params["w"], 5 - 3 * 0.1, rtol=1e-7)
    assert_replicas_equal(state.params)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("algorithm", CORE)
def test_law_1_twenty_steps_equal_one_device(algorithm, microbatches, mesh_of, rng, few):
    batches, params = [net_batch(rng) for _ in range(20)], net_params(rng)
    options = {"microbatches": microbatches, "clip_norm": 0.5}
    one, rows = train(mesh_of(1), batches, params, **options)
    for n in few((2, 3, 4, 8), 1):
        state, more_rows = train(mesh_of(n), batches, params, algorithm, **options)
        assert_replicas_equal((state.params, state.opt_state))
        for name, p in one.params.items():
            difference = np.linalg.norm(np.asarray(p) - np.asarray(state.params[name]))
            assert difference / np.linalg.norm(p) <= 5e-6, (n, name)
        for a, b in zip(rows, more_rows, strict=True):  # L1: the metrics are the whole batch's
            assert a == pytest.approx(b, rel=2e-5)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("algorithm", CORE)
def test_v2_law_1_in_x64(algorithm, microbatches, mesh_of, rng, few):
    with jax.enable_x64(True):
        batches = [net_batch(rng, np.float64) for _ in range(20)]
        params = net_params(rng, np.float64)
        one, _ = train(mesh_of(1), batches, params, microbatches=microbatches)
        for n in few((2, 3, 4, 8), 1):
            state, _ = train(mesh_of(n), batches, params, algorithm, microbatches=microbatches)
            assert_replicas_equal(state.params)
            for name, p in one.params.items():
                p, q = np.asarray(p), np.asarray(state.params[name])
                assert p.dtype == np.float64
                update = np.linalg.norm(p - params[name])
                assert np.linalg.norm(p - q) / update <= 1e-12, (n, name)


def test_v2_a_collective_inside_the_loss_is_refused(mesh_of):
    def pmean(params, model_state, batch, keys):
        return jax.lax.pmean((params["w"] * batch["g"]).sum(), "data"), jnp.float32(1)

    def hidden(params, model_state, batch, keys):
        def body(carry, x):
            return carry + jax.lax.ppermute(x, "data", [(0, 1)]), None

        return jax.lax.scan(jax.jit(body), params["w"], batch["g"])[0], jnp.float32(1)

    for loss, name in ((pmean, "psum"), (hidden, "ppermute")):
        with pytest.raises(UserError, match=f"calls the collective {name}"):
            train(mesh_of(2), [{"g": np.ones(2, np.float32)}], {"w": np.float32(5)}, loss=loss)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_v3_unequal_counts_give_the_pooled_mean(microbatches, mesh_of, rng):
    counts = np.array([1, 9, 1, 7, 3, 12, 0, 2], np.float32)
    g = rng.normal(size=8).astype(np.float32)

    def loss(params, model_state, batch, keys):
        return (params["w"] * batch["g"] * batch["count"]).sum(), batch["count"].sum()

    state, _ = train(
        mesh_of(2),
        [{"g": g, "count": counts}],
        {"w": np.float32(5)},
        loss=loss,
        microbatches=microbatches,
    )
    pooled = (g * counts).sum() / counts.sum()
    np.testing.assert_allclose(state.params["w"], 5 - 0.1 * pooled, rtol=1e-6)


def test_v4_masked_replicas(mesh_of, rng):
    params, batch = net_params(rng), net_batch(rng)
    batch["weight"][: BATCH // 2] = 0  # the whole first device
    state, [row] = train(mesh_of(2), [batch], params, optimizer=optax.adamw(0.1))
    assert np.isfinite(list(row.values())).all()
    assert row["skipped"] == 0
    batch["weight"][:] = 0
    before = jax.device_get(state)
    after, [row] = train(mesh_of(2), [batch], before.params, optimizer=optax.adamw(0.1))
    assert row["skipped"] == 1
    assert int(after.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before.params, jax.device_get(after.params))
    assert int(optax.tree.get(after.opt_state, "count")) == 0


def test_v5_every_microbatch_counts_once(mesh_of):
    # microbatch m alone gives 10 ** m: a digit that is not 1 shows one dropped or counted twice
    g = np.repeat(10.0 ** np.arange(4), 2).astype(np.float32)
    for n in (1, 2):
        state, _ = train(
            mesh_of(n), [{"g": g}], {"w": np.float32(0)}, loss=linear_loss, microbatches=4
        )
        np.testing.assert_allclose(-state.params["w"] / 0.1 * 8, 2222, rtol=1e-6)


def test_v6_the_optimizer_runs_once_per_step(mesh_of, rng):
    batches, params = [net_batch(rng) for _ in range(5)], net_params(rng)
    adamw = optax.adamw(1e-2, weight_decay=0.1, eps=1e-3)

    def loss(params, model_state, batch, keys):  # dropout would differ between layouts: none here
        return net_loss(params, model_state, batch, None)

    states = [
        train(mesh_of(2), batches, params, loss=loss, optimizer=adamw, microbatches=m)[0]
        for m in (1, 4)
    ]
    assert [int(optax.tree.get(state.opt_state, "count")) for state in states] == [5, 5]
    for name in params:
        np.testing.assert_allclose(*(np.asarray(s.params[name]) for s in states), atol=2e-5)


def test_v7_the_reduced_gradient_is_clipped(mesh_of):
    g = np.array([30, -26], np.float32)  # each is above the limit, their mean 2 is not
    for limit, step in ((10.0, 2.0), (1.0, 1.0)):
        state, [row] = train(
            mesh_of(2), [{"g": g}], {"w": np.float32(0)}, loss=linear_loss, clip_norm=limit
        )
        np.testing.assert_allclose(state.params["w"], -0.1 * step, rtol=1e-6)
        assert row["grad_norm"] == pytest.approx(2)


def test_v9_gradients_are_reduced_in_float32(mesh_of):
    # 256 + 1 is 256 in bfloat16
    g = np.array([256, 1, 1, 1], np.float32)
    state, _ = train(
        mesh_of(4), [{"g": g}], {"w": np.float32(0)}, loss=linear_loss, compute_dtype=jnp.bfloat16
    )
    assert state.params["w"].dtype == np.float32
    np.testing.assert_allclose(state.params["w"], -0.1 * 259 / 4, rtol=1e-6)


def test_v13_randomness_belongs_to_the_example(mesh_of):
    def loss(params, model_state, batch, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (BATCH,)))(keys)
        # row i of the gradient is the noise of example i
        return (params["w"][batch["row"]] * noise).sum(), jnp.float32(1)

    batch = {"row": np.arange(BATCH, dtype=np.int32)}
    w = {"w": np.zeros((BATCH, BATCH), np.float32)}
    drawn = []
    for n, microbatches in ((1, 1), (8, 1), (1, 4), (3, 4)):
        state, _ = train(
            mesh_of(n), [batch], w, loss=loss, optimizer=optax.sgd(1.0), microbatches=microbatches
        )
        drawn.append(np.sign(np.asarray(state.params["w"])))
    assert len({row.tobytes() for row in drawn[0]}) == BATCH
    for other in drawn[1:]:
        np.testing.assert_array_equal(drawn[0], other)


def test_r3_a_nan_on_one_device_leaves_all_as_they_were(mesh_of, rng):
    params, batch = net_params(rng), net_batch(rng)
    batch["weight"][:] = 1
    batch["x"][-1, 0] = np.nan
    state, [row] = train(mesh_of(4), [batch], params, "ring", optimizer=optax.adam(0.1))
    assert row["nonfinite"] == 1
    assert_replicas_equal((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(state.params))


def test_a_negative_weight_changes_nothing(mesh_of):
    def loss(params, model_state, batch, keys):
        return (params["w"] * batch["g"]).sum(), jnp.float32(-1)

    state, [row] = train(
        mesh_of(2), [{"g": np.ones(2, np.float32)}], {"w": np.float32(5)}, loss=loss
    )
    assert row["nonfinite"] == 1
    assert state.params["w"] == 5


def test_model_state_is_the_weighted_mean(mesh_of):
    def loss(params, model_state, batch, keys):
        weight = batch["count"].sum()
        return LossOut(
            (params["w"] * batch["count"]).sum(), weight, {}, {"seen": model_state["seen"] + weight}
        )

    step = make_train_step(loss, optax.sgd(0.1), all_reduce_sync(), mesh_of(2))
    state = step.init({"w": np.float32(1)}, {"seen": np.float32(10)})
    state, _ = step(state, step.place({"count": np.array([1, 3], np.float32)}))
    np.testing.assert_allclose(state.model_state["seen"], (1 * 11 + 3 * 13) / 4)


def test_law_3_one_reduction_per_step(mesh_of, rng, few):
    cases = itertools.product((1, 2, 3, 4, 8), (1, 4), CORE)
    for n, microbatches, algorithm in few(cases, 8):
        step = make_train_step(
            net_loss,
            optax.sgd(0.1),
            all_reduce_sync(algorithm),
            mesh_of(n),
            microbatches=microbatches,
        )
        state, batch = step.init(net_params(rng)), step.place(net_batch(rng))
        text = step.run.lower(state, batch).compile().as_text()
        found = hlo.collectives(text)
        assert not any(collective.in_loop for collective in found)
        assert microbatches == 1 or " while(" in text  # there is a loop to be in
        kinds = [collective.kind for collective in found]
        if algorithm == "ring":
            assert kinds == ["collective-permute"] * (2 * (n - 1))
        if algorithm == "psum":
            assert kinds == ["all-reduce"]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "batch is empty"),
        ([1, 2], "batch is of type list"),
        (None, "batch is of type NoneType"),
        ({"x": [1, 2]}, "batch['x'] is of type list"),
        ({"x": np.ones(4), "y": 3}, "batch['y'] is of type int"),
    ],
)
def test_what_is_no_batch_is_one_line(batch, words, mesh_of):
    step = make_train_step(net_loss, optax.sgd(0.1), all_reduce_sync(), mesh_of(2))
    with pytest.raises(UserError, match="expected a dict of NumPy arrays") as error:
        step.place(batch)
    [line] = error.value.lines
    assert line.startswith(words)


def test_the_name_of_an_algorithm_is_no_synchronisation(mesh_of):
    sync: Any = "ring"
    with pytest.raises(UserError, match=r"sync: 'ring'; expected .* jaxdp.all_reduce_sync"):
        make_train_step(net_loss, optax.sgd(0.1), sync, mesh_of(2))


def test_one_compilation(mesh_of, rng):
    step = make_train_step(net_loss, optax.adam(0.1), all_reduce_sync("ring"), mesh_of(3))
    state = step.init(net_params(rng))
    for _ in range(3):
        state, _ = step(state, step.place(net_batch(rng)))
    assert step.run._cache_size() == 1


def test_the_callers_parameters_survive(mesh_of, rng):
    params = {name: jnp.asarray(x) for name, x in net_params(rng).items()}
    train(mesh_of(2), [net_batch(rng)] * 2, params)
    assert all(np.isfinite(np.asarray(x)).all() for x in params.values())


def test_mistakes_are_one_line(mesh_of, rng):
    params, batch = {"w": np.float32(5)}, {"g": np.ones(6, np.float32)}

    def message(loss=linear_loss, params=params, batch=batch, **options):
        with pytest.raises(UserError) as error:
            train(mesh_of(4), [batch], params, loss=loss, **options)
        assert len(error.value.lines) == 1
        return str(error.value)

    assert "shape (6,); expected a first dimension divisible by 4" in message()
    batch = {"g": np.ones(8, np.float32)}
    assert "not a mean" in message(lambda p, s, b, k: p["w"] * b["g"].mean(), batch=batch)
    assert "pair of scalars" in message(lambda p, s, b, k: (p["w"] * b["g"], 8.0), batch=batch)

    uneven = {"g": np.ones(8, np.float32), "h": np.ones(4, np.float32)}
    assert "lengths {'g': 8, 'h': 4}; expected one length" in message(batch=uneven)
    words = {"g": np.array(["a"] * 8)}
    assert "batch['g'] is of dtype <U1; expected numbers" in message(batch=words)
    assert "optimizer: 'adam'; expected an optax" in message(batch=batch, optimizer="adam")
    uncalled = message(batch=batch, optimizer=optax.adam)
    assert "expected an optax transformation, such as optax.adam(1e-3)" in uncalled
    assert "microbatches: 0; expected" in message(batch=batch, microbatches=0)
    assert "clip_norm: -1.0; expected a number above 0" in message(batch=batch, clip_norm=-1.0)
    assert "seed: -1; expected" in message(batch=batch, seed=-1)

    def with_metrics(metrics):
        return lambda p, s, b, k: LossOut((p["w"] * b["g"]).sum(), jnp.float32(8), metrics)

    scalar = with_metrics({"accuracy": jnp.float32(1)})
    assert "accuracy with shape (); expected a pair" in message(scalar, batch=batch)
    reserved = with_metrics({"loss": (jnp.float32(1), jnp.float32(2))})
    assert "metrics named loss; expected other names" in message(reserved, batch=batch)
    shown = with_metrics(dict.fromkeys(("step", "eta_s", "eval/loss", "mine"), (1.0, 2.0)))
    assert "metrics named eta_s, eval/loss, step;" in message(shown, batch=batch)
    assert "w: dtype int32" in message(params={"w": np.int32(5)}, batch=batch)

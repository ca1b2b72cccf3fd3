"""Local SGD against the same in NumPy, against plain SGD and against the data-parallel step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import LossOut, all_reduce_sync, hlo, make_train_step
from jaxdp.errors import UserError
from jaxdp.freeze import freeze
from jaxdp.models.batch_norm import sum_over_devices
from jaxdp.plan import as_planned
from jaxdp.steps import make_local_sgd_step, outer_sgd
from jaxdp.steps.local_sgd import respread
from jaxdp.sync import sharded_sync

BATCH, WIDTH = 48, 5


def squares(params, model_state, batch, keys):
    """Weighted least squares: sum of weight * (x a - y)^2 / 2."""
    error = batch["x"] @ params["a"] - batch["y"]
    return (batch["weight"] * error**2).sum() / 2, batch["weight"].sum()


def noisy(params, model_state, batch, keys):
    """The same, with targets drawn from the example's own key."""
    shift = jax.vmap(lambda key: jax.random.normal(key, dtype=batch["y"].dtype))(keys)
    return squares(params, model_state, {**batch, "y": batch["y"] + shift}, None)


def make_batch(rng, dtype=np.float64):
    """Random examples of weight 0 to 3; the first eighth, a device's first inner step, has none."""
    weight = rng.integers(0, 4, BATCH)
    weight[: BATCH // 8] = 0
    return {
        "x": rng.normal(size=(BATCH, WIDTH)).astype(dtype),
        "y": rng.normal(size=BATCH).astype(dtype),
        "weight": weight.astype(dtype),
    }


def start(rng, dtype=np.float64):
    return {"a": rng.normal(size=WIDTH).astype(dtype)}


def train(mesh, batches, params, *, loss=squares, optimizer=None, sync=None, **options):
    step = make_local_sgd_step(
        loss, optimizer or optax.sgd(0.1), sync or all_reduce_sync(), mesh, **options
    )
    state = step.init(params)
    rows = []
    for batch in batches:
        state, metrics = step(state, step.place(batch))
        rows.append({name: float(value) for name, value in metrics.items()})
    return state, rows


def assert_replicas_equal(tree):
    for leaf in jax.tree.leaves(tree):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert all(first.tobytes() == other.tobytes() for other in others)


class Oracle:
    """The whole algorithm in NumPy: inner SGD with momentum, outer SGD with Nesterov momentum."""

    def __init__(self, a, n, local_steps, microbatches, rates, clip):
        self.a, self.n, self.local_steps, self.clip = a, n, local_steps, clip
        self.microbatches, self.rates = microbatches, rates
        self.traces, self.outer = np.zeros((n, WIDTH)), np.zeros(WIDTH)

    def split(self, x):
        """Leaves `[inner step, device, example, ...]`."""
        x = x.reshape(self.local_steps, self.microbatches, self.n, -1, *x.shape[1:])
        return x.swapaxes(1, 2).reshape(self.local_steps, self.n, -1, *x.shape[4:])

    def step(self, batch):
        """(loss, norm of the pseudo-gradient, mean norm of the inner gradients)."""
        rate, momentum, outer_rate, outer_momentum = self.rates
        x, y, w = (self.split(batch[name]) for name in ("x", "y", "weight"))
        moved, loss, norms = np.zeros(WIDTH), 0.0, 0.0
        for i in range(self.n):
            a = self.a.copy()
            for h in range(self.local_steps):
                weight, error = w[h, i].sum(), x[h, i] @ a - y[h, i]
                if not weight:
                    continue
                loss += (w[h, i] * error**2).sum() / 2
                gradient = x[h, i].T @ (w[h, i] * error) / weight
                norm = np.linalg.norm(gradient)
                norms += weight * norm
                self.traces[i] = gradient * min(1, self.clip / norm) + momentum * self.traces[i]
                a -= rate * self.traces[i]
            moved += w[:, i].sum() * (self.a - a)
        moved /= w.sum()
        self.outer = moved + outer_momentum * self.outer
        self.a = self.a - outer_rate * (moved + outer_momentum * self.outer)
        return loss / w.sum(), np.linalg.norm(moved), norms / w.sum()


@pytest.mark.parametrize(
    ("n", "local_steps", "microbatches", "clip", "sync"),
    [
        (1, 4, 1, None, all_reduce_sync()),
        (2, 4, 2, None, all_reduce_sync("ring")),
        (3, 2, 1, 0.5, all_reduce_sync("recursive_doubling", bucket_bytes=64)),
        (4, 3, 2, None, all_reduce_sync("psum")),
    ],
)
def test_it_is_the_algorithm_in_numpy(n, local_steps, microbatches, clip, sync, mesh_of, rng):
    with jax.enable_x64(True):
        batches, params = [make_batch(rng) for _ in range(4)], start(rng)
        rates = 0.1, 0.8, 0.7, 0.9
        oracle = Oracle(params["a"], n, local_steps, microbatches, rates, clip or np.inf)
        state, rows = train(
            mesh_of(n),
            batches,
            params,
            optimizer=optax.sgd(0.1, momentum=0.8),
            sync=sync,
            local_steps=local_steps,
            microbatches=microbatches,
            outer_optimizer=outer_sgd(0.7, 0.9),
            clip_norm=clip,
        )
        expected = [oracle.step(batch) for batch in batches]
        np.testing.assert_allclose(state.params["a"], oracle.a, rtol=1e-11)
        [trace] = jax.tree.leaves(state.sync_state)
        np.testing.assert_allclose(trace, oracle.traces, rtol=1e-10, atol=1e-13)
    shown = [[row[k] for k in ("loss", "grad_norm", "inner_grad_norm")] for row in rows]
    np.testing.assert_allclose(shown, expected, rtol=1e-5)
    assert_replicas_equal((state.params, state.opt_state))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_one_inner_step_of_sgd_is_the_data_parallel_step(n, mesh_of, rng):
    with jax.enable_x64(True):
        batches, params = [make_batch(rng) for _ in range(3)], start(rng)
        state, rows = train(mesh_of(n), batches, params, loss=noisy, local_steps=1, microbatches=2)
        plain = make_train_step(
            noisy, optax.sgd(0.1), all_reduce_sync(), mesh_of(n), microbatches=2
        )
        other = plain.init(params)
        for batch, row in zip(batches, rows, strict=True):
            other, metrics = plain(other, plain.place(batch))
            assert row["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-5)
            # what was moved is the rate times the gradient
            assert row["grad_norm"] == pytest.approx(0.1 * float(metrics["grad_norm"]), rel=1e-5)
        np.testing.assert_allclose(state.params["a"], other.params["a"], rtol=1e-12)


def test_randomness_belongs_to_the_example(mesh_of):
    def loss(params, model_state, batch, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
        # row i of the gradient is the noise of example i
        return (params["w"][batch["row"]] * noise).sum(), jnp.float32(1)

    batch = {"row": np.arange(BATCH, dtype=np.int32)}
    w = {"w": np.zeros((BATCH, WIDTH), np.float32)}
    drawn = []
    for n, local_steps, microbatches in ((1, 1, 1), (2, 2, 1), (2, 3, 2)):
        options = {"local_steps": local_steps, "microbatches": microbatches}
        state, _ = train(mesh_of(n), [batch], w, loss=loss, **options)
        drawn.append(np.sign(np.asarray(state.params["w"])))
    assert len({row.tobytes() for row in drawn[0]}) > 1
    for other in drawn[1:]:
        np.testing.assert_array_equal(drawn[0], other)


def test_a_device_without_weight_does_not_move(mesh_of, rng):
    params, batch = start(rng, np.float32), make_batch(rng, np.float32)
    batch["weight"].reshape(3, 2, -1)[:, 1] = 0  # the second device, in all three inner steps
    batch["weight"].reshape(3, 2, -1)[2] = 0  # and the first one in the last
    batch["weight"].reshape(3, 2, -1)[:2, 0] = 1
    optimizer = optax.adam(0.1)
    state, [row] = train(mesh_of(2), [batch], params, optimizer=optimizer, local_steps=3)
    assert row["skipped"] == 0
    assert np.asarray(optax.tree.get(state.sync_state.inner, "count")).tolist() == [2, 0]
    alone = {name: x.reshape(3, 2, -1, *x.shape[1:])[:2, 0] for name, x in batch.items()}
    alone = {name: x.reshape(-1, *x.shape[2:]) for name, x in alone.items()}
    one, _ = train(mesh_of(1), [alone], params, optimizer=optimizer, local_steps=2)
    np.testing.assert_allclose(state.params["a"], one.params["a"], rtol=1e-6)

    batch["weight"][:] = 0
    state, [row] = train(mesh_of(2), [batch], params, optimizer=optimizer, local_steps=3)
    assert row["skipped"] == 1
    np.testing.assert_array_equal(state.params["a"], params["a"])


def test_what_is_not_finite_undoes_the_step_on_all_devices(mesh_of, rng):
    def steep(params, model_state, batch, keys):
        """The loss stays finite, its gradient does not."""
        total, weight = squares(params, model_state, batch, keys)
        return total + jnp.sqrt(params["a"][0] * batch["zero"]).sum(), weight

    params = start(rng, np.float32)
    bad, good = make_batch(rng, np.float32), make_batch(rng, np.float32)
    bad["x"][BATCH // 2 - 1, 0] = np.nan  # second device, first of two inner steps
    bad["weight"][BATCH // 2 - 1] = 1
    zero = np.ones(BATCH, np.float32)
    zero[BATCH // 2 - 1] = 0
    for loss, batch in ((squares, bad), (steep, good | {"zero": zero})):
        if loss is steep:
            params["a"][0] = 1
        state, [row] = train(
            mesh_of(2),
            [batch],
            params,
            loss=loss,
            optimizer=optax.chain(optax.zero_nans(), optax.adam(0.1)),  # which would hide it
            sync=all_reduce_sync("ring"),
            local_steps=2,
        )
        assert row["nonfinite"] == 1
        np.testing.assert_array_equal(state.params["a"], params["a"])
        assert not np.asarray(optax.tree.get(state.sync_state.inner, "count")).any()


def test_an_overflow_of_float16_halves_the_scale(mesh_of):
    def loss(params, model_state, batch, keys):
        # the scaled loss is finite in float32, its gradient is not in float16
        return (params["w"] * batch["g"].astype(params["w"].dtype)).sum(), jnp.float32(len(keys))

    g = np.array([1, 4, 1, 4], np.float32)
    batches = [{"g": g}] * 4
    options = {"local_steps": 2, "compute_dtype": jnp.float16, "optimizer": optax.sgd(1.0)}
    state, rows = train(mesh_of(2), batches, {"w": np.float32(0)}, loss=loss, **options)
    assert [row["overflows"] for row in rows] == [1, 2, 2, 2]
    assert rows[-1]["nonfinite"] == 0
    assert rows[-1]["loss_scale"] == 2.0**13
    np.testing.assert_allclose(state.params["w"], -2 * (2 + 8) / 2)


def test_model_state_is_local_then_the_weighted_mean(mesh_of):
    def loss(params, model_state, batch, keys):
        seen = 2 * model_state["seen"] + batch["count"].sum()
        return LossOut(
            (params["w"] * batch["count"]).sum(), batch["count"].sum(), {}, {"seen": seen}
        )

    step = make_local_sgd_step(loss, optax.sgd(0.1), all_reduce_sync(), mesh_of(2), local_steps=2)
    state = step.init({"w": np.float32(1)}, {"seen": np.float32(10)})
    state, _ = step(state, step.place({"count": np.array([1, 3, 0, 5], np.float32)}))
    first, second = 2 * 10 + 1, 2 * (2 * 10 + 3) + 5  # the first one's second step has no weight
    np.testing.assert_allclose(state.model_state["seen"], (1 * first + 8 * second) / 9)


def test_frozen_leaves_do_not_move(mesh_of, rng):
    def loss(params, model_state, batch, keys):
        return squares({"a": params["a"] * params["scale"]}, model_state, batch, keys)

    params = start(rng, np.float32) | {"scale": np.full(WIDTH, 0.5, np.float32)}
    state, [row] = train(
        mesh_of(2),
        [make_batch(rng, np.float32)],
        params,
        loss=loss,
        optimizer=optax.adamw(0.1),
        local_steps=2,
        frozen=freeze(["scale"]),
    )
    np.testing.assert_array_equal(state.params["scale"], params["scale"])
    moved = np.asarray(state.params["a"]) - params["a"]
    assert row["grad_norm"] == pytest.approx(np.linalg.norm(moved), rel=1e-5)


def test_schedules_count_outer_steps(mesh_of):
    from jaxdp.optim import scale_by_step_schedule

    def loss(params, model_state, batch, keys):
        return (params["w"] * batch["g"]).sum(), jnp.float32(len(batch["g"]))

    rate = scale_by_step_schedule(lambda step: 10.0**-step)
    batches = [{"g": np.ones(6, np.float32)}] * 2
    state, _ = train(
        mesh_of(2), batches, {"w": np.float32(0)}, loss=loss, optimizer=rate, local_steps=3
    )
    np.testing.assert_allclose(state.params["w"], -3 * (1 + 0.1), rtol=1e-6)


@pytest.mark.parametrize(
    "sync",
    [
        all_reduce_sync(),
        all_reduce_sync("ring"),
        all_reduce_sync("halving_doubling", bucket_bytes=64, wire="bfloat16"),
    ],
    ids=["psum", "ring", "bfloat16"],
)
def test_one_reduction_per_outer_step_as_planned(sync, mesh_of, rng):
    step = make_local_sgd_step(
        squares, optax.adam(0.1), sync, mesh_of(4), local_steps=3, microbatches=2
    )
    state = step.init(start(rng, np.float32))
    batch = step.place(make_batch(rng, np.float32))
    plan = step.plan(state, batch)
    compiled = step.run.lower(state, batch).compile()
    found = hlo.collectives(compiled.as_text())
    assert found
    assert not any(collective.in_loop for collective in found)
    assert as_planned(plan, found)
    for _ in range(3):
        state, _ = step(state, step.place(make_batch(rng, np.float32)))
    assert step.run._cache_size() == 1
    assert_replicas_equal((state.params, state.opt_state))


def test_another_number_of_devices_gets_the_mean(rng):
    moments, counts = rng.normal(size=(3, 4)).astype(np.float32), np.array([5, 7, 0], np.int32)
    found = respread({"mu": moments, "count": counts}, 5)
    np.testing.assert_allclose(found["mu"], np.tile(moments.mean(0), (5, 1)), rtol=1e-6)
    assert found["mu"].dtype == np.float32
    assert found["count"].tolist() == [7] * 5
    assert found["count"].dtype == np.int32


def test_mistakes_are_one_line(mesh_of, rng):
    def summed(params, model_state, batch, keys):
        total, weight = squares(params, model_state, batch, keys)
        return sum_over_devices(total), weight

    batches, params = [make_batch(rng, np.float32)], start(rng, np.float32)
    for options, line in (
        ({"local_steps": 0}, "local_steps: 0; expected a whole number of at least 1"),
        ({"local_steps": 5}, "expected a first dimension divisible by 10"),
        ({"local_steps": 2, "clip_norm": 0.0}, "clip_norm: 0.0; expected a number above 0"),
        ({"local_steps": 2, "sync": sharded_sync()}, "sync: ShardedSync; expected a GradSync"),
        ({"local_steps": 2, "loss": summed}, "each device has parameters of its own; expected"),
    ):
        with pytest.raises(UserError, match=line) as error:
            train(mesh_of(2), batches, params, **options)
        assert len(error.value.lines) == 1

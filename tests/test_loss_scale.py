"""float16 with a dynamic loss scale: closed forms, one device, and float32 as the oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import all_reduce_sync, fit, make_train_step
from jaxdp.errors import NumericsError, UserError
from jaxdp.guard import compare_replicas
from jaxdp.loop import Every
from jaxdp.loss_scale import DynamicScale


def linear(params, model_state, batch, keys):
    """Gradient with respect to w: the sum of the examples' own numbers, in the dtype of w."""
    out = params["w"] * batch["g"].astype(params["w"].dtype)
    return out.astype(jnp.float32).sum(), jnp.float32(len(out))


def net(params, model_state, batch, keys):
    dtype = params["a"].dtype
    hidden = jnp.tanh(batch["x"].astype(dtype) @ params["a"] + params["b"][None])
    logits = (hidden @ params["c"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (losses * batch["weight"]).sum(), batch["weight"].sum()


def net_case(rng, steps):
    shapes = {"a": (13, 17), "b": (17,), "c": (17, 5)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    batches = [
        {
            "x": rng.normal(size=(96, 13)).astype(np.float32),
            "y": rng.integers(0, 5, 96).astype(np.int32),
            "weight": rng.integers(0, 4, 96).astype(np.float32),
        }
        for _ in range(steps)
    ]
    return params, batches


def make(mesh, loss=linear, algorithm="psum", dtype=jnp.float16, optimizer=None, **options):
    return make_train_step(
        loss, optimizer or optax.sgd(0.5), all_reduce_sync(algorithm), mesh,
        compute_dtype=dtype, **options,
    )  # fmt: skip


def train(step, params, batches):
    state, rows = step.init(params), []
    for batch in batches:
        state, metrics = step(state, step.place(batch))
        rows.append({name: float(value) for name, value in metrics.items()})
    return state, rows


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradients_below_float16_survive(n, mesh_of, rng):
    exponents = rng.integers(-38, -26, 8)  # float16 ends at 2^-24
    g = np.ldexp(1.0, exponents).astype(np.float32)

    def loss(params, model_state, batch, keys):
        return (params["w"] * batch["row"]).astype(jnp.float32).dot(batch["g"]), jnp.float32(8 / n)

    ones = np.ones(8, np.float16)
    state, [row] = train(make(mesh_of(n), loss), {"w": np.float32(0)}, [{"g": g, "row": ones}])
    # a device's gradient is a sum in float16, of 11 bits; that of the devices is not
    assert row["grad_norm"] == pytest.approx(g.sum() / 8, rel=8 * 2**-11)
    assert float(state.params["w"]) == -0.5 * np.float32(row["grad_norm"])
    plain, _ = train(
        make(mesh_of(n), loss, loss_scale=DynamicScale(initial=1.0)),
        {"w": np.float32(0)},
        [{"g": g, "row": ones}],
    )
    assert float(plain.params["w"]) == 0


@pytest.mark.parametrize("algorithm", ["psum", "ring"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_v8_an_overflow_halves_the_scale_and_moves_only_the_data_on(n, algorithm, mesh_of, rng):
    values = rng.integers(18000, 22000, 4) // 32 * 32  # whole in float16
    mesh = mesh_of(n)
    step = make(mesh, algorithm=algorithm, optimizer=optax.adam(0.1), microbatches=4 // n)
    state = step.init({"w": np.float32(0)})
    before = jax.device_get(state)
    batch = step.place({"g": values.astype(np.float32)})
    for t in range(14):  # 2^15 to 2: 20000 * 4 is infinite in float16
        state, metrics = step(state, batch)
        assert float(metrics["loss_scale"]) == 2.0 ** (14 - t)
        assert float(metrics["overflows"]) == t + 1
        assert (int(state.step), int(state.nonfinite), int(state.skipped)) == (t + 1, 0, 0)
        for name in ("params", "opt_state"):
            jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(state, name))
    state, metrics = step(state, batch)
    # each device's gradient is summed in float32: their mean is finite and exact
    assert float(metrics["grad_norm"]) == values.mean()
    assert float(metrics["overflows"]) == 14
    assert float(state.params["w"]) == pytest.approx(-0.1, rel=1e-4)
    assert compare_replicas(mesh, state) == []


def test_the_scale_doubles_after_good_steps_and_no_further_than_its_end(mesh_of, rng):
    options = DynamicScale(initial=2.0**21, growth_steps=3)
    step = make(mesh_of(2), loss_scale=options)
    batches = [{"g": np.ldexp(rng.random(4), -12).astype(np.float32)} for _ in range(14)]
    _, rows = train(step, {"w": np.float32(0)}, batches)
    exponents = [int(np.log2(row["loss_scale"])) for row in rows]
    # scales above 2^15 do not fit float16 themselves: these steps overflow and come down first
    down = exponents.index(15)
    assert exponents[: down + 1] == list(range(20, 14, -1))
    assert exponents[down + 1 : down + 7] == [15, 15, 16, 15, 15, 15]
    assert rows[-1]["overflows"] >= 7


def test_a_loss_that_is_not_finite_is_no_overflow(mesh_of):
    step = make(mesh_of(2))
    _, [row] = train(step, {"w": np.float32(0)}, [{"g": np.float32([1, np.nan])}])
    assert (row["nonfinite"], row["overflows"], row["loss_scale"]) == (1, 0, 2.0**15)


def test_a_scale_that_cannot_fall_further_stops_the_run(mesh_of):
    def loss(params, model_state, batch, keys):  # finite, with a slope that is not
        return jnp.sqrt(params["w"] * batch["g"]).astype(jnp.float32).sum(), jnp.float32(1)

    class Batches:
        def batch(self, step):
            return {"g": np.zeros(4, np.float16)}

    step = make(mesh_of(2), loss)
    _, rows = train(step, {"w": np.float32(0)}, [Batches().batch(0)] * 17)
    assert [row["overflows"] for row in rows[14:]] == [15, 15, 15]
    assert [row["nonfinite"] for row in rows[14:]] == [0, 1, 2]
    state, log = step.init({"w": np.float32(0)}), Every(1, lambda t, row: None)
    with pytest.raises(NumericsError, match="not finite"):
        fit(step, state, Batches(), 99, log=log)


@pytest.mark.parametrize("algorithm", ["psum", "ring", "recursive_doubling"])
def test_float16_is_float32_to_the_usual_accuracy_and_replicas_agree(algorithm, mesh_of, rng, few):
    params, batches = net_case(rng, 20)
    options = {"clip_norm": 0.5, "microbatches": 2}
    exact, rows = train(make(mesh_of(1), net, dtype=None, **options), params, batches)
    # no overflow: with one, the runs would have seen other steps
    options |= {"loss_scale": DynamicScale(initial=2.0**6)}
    for n in few((1, 2, 3, 4, 8), 1):
        mesh = mesh_of(n)
        state, half_rows = train(make(mesh, net, algorithm, **options), params, batches)
        assert compare_replicas(mesh, state) == []
        assert half_rows[-1]["overflows"] == 0
        for name, p in exact.params.items():
            p, q = np.asarray(p), np.asarray(state.params[name])
            assert q.dtype == np.float32
            moved = np.linalg.norm(p - params[name])
            assert np.linalg.norm(p - q) / moved < 1e-2, (n, name)
        for a, b in zip(rows, half_rows, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)


def test_a_scale_without_effect_is_refused(mesh_of):
    with pytest.raises(UserError, match="has no effect with compute_dtype"):
        make(mesh_of(1), dtype=jnp.bfloat16, loss_scale=DynamicScale())

"""Error feedback: nothing is lost, whatever compresses, whatever the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import all_reduce_sync, hlo, load_config, power_sgd_sync, top_k_sync
from jaxdp.plan import as_planned, compare
from jaxdp.sync.feedback import Compressor, error_feedback, respread

SYNCS = {
    "top_k": lambda algorithm="psum": top_k_sync(0.05, algorithm=algorithm),
    "power_sgd": lambda algorithm="psum": power_sgd_sync(2, algorithm=algorithm),
}
OTHERS = (13 + 2 * 2 + 1) * 4  # bytes of model state, two pairs of scalars, the flag


def random_grads(rng, params, n):
    return {
        name: rng.normal(size=(n, *p.shape)).astype(np.float32) * 10.0 ** rng.integers(-3, 3)
        for name, p in params.items()
    }


@pytest.mark.parametrize("name", SYNCS)
def test_applied_and_owed_are_what_there_was(name, synced, params, rng, few):
    start = params()
    for n in few([2, 3, 4, 8], 1):
        update = synced(SYNCS[name](), n)
        state = update.blank(start)
        applied = {key: np.zeros(p.shape) for key, p in start.items()}
        true, size = ({key: np.zeros(p.shape) for key, p in start.items()} for _ in range(2))
        lossy = set()
        for _ in range(6):
            weight = np.float32(10.0 ** rng.uniform(0, 3))
            grads = jax.tree.map(lambda g, w=weight: g * w, random_grads(rng, start, n))
            summed, state = update(grads, weight, state)
            for key in start:
                mean = grads[key].sum(0, dtype=np.float64) / weight
                true[key] += mean
                size[key] = np.maximum(size[key], np.abs(grads[key] / weight).max())
                applied[key] += np.float64(summed[key]) / weight
                if np.abs(applied[key] - true[key]).max() > 0.1 * np.abs(true[key]).max():
                    lossy.add(key)
        for key in start:
            residual = state["residual"][key]
            owed = 0 if residual is None else residual.sum(0, dtype=np.float64)
            assert (np.abs(applied[key] + owed - true[key]) <= 6e-6 * n * size[key]).all(), key
        assert {"a", "c"} <= lossy  # else there was nothing to feed back


def test_law_3_found_is_planned(compiled, params, batches, few):
    cases = [
        (name, algorithm, n, microbatches)
        for name in SYNCS
        for algorithm in ("psum", "ring", "bidirectional_ring", "hierarchical")
        for n in (1, 2, 3, 4, 8)
        for microbatches in (1, 4)
    ]
    start, [batch] = params(), batches(1)
    for name, algorithm, n, microbatches in few(cases, 3):
        sync = SYNCS[name](algorithm)
        plan, text = compiled(sync, n, start, batch, microbatches=microbatches)
        found = hlo.collectives(text)
        case = (name, algorithm, n, microbatches, compare(plan, found))
        assert as_planned(plan, found), case
        parts = {"top_k": ("values", "indices"), "power_sgd": ("factors P", "factors Q")}
        assert plan.names == (("exact bucket", *parts[name]) if n > 1 else ()), case


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_bytes_sent(n, begun, params, batches):
    """Closed forms against the plan, which the test above holds against programs."""
    start, [batch] = params(), batches(1)
    k = round(0.05 * sum(p.size for p in start.values()))

    def sent(name):
        step, state = begun(SYNCS[name](), n, start)
        return step.plan(state, step.place(batch)).sent_bytes

    def all_reduce(nbytes):
        return 2 * (n - 1) * nbytes // n

    assert sent("top_k") == all_reduce(OTHERS) + 8 * (n - 1) * k
    whole = (start["b"].nbytes + start["e"].nbytes) + OTHERS
    rows, columns = 13 + 37 + 23, 37 + 23 + 5
    assert sent("power_sgd") == all_reduce(whole) + all_reduce(8 * rows) + all_reduce(8 * columns)


@pytest.mark.parametrize("fault", ["nan", "inf", "empty"])
@pytest.mark.parametrize("name", SYNCS)
def test_r3_a_step_that_does_not_count_leaves_residuals_alone(name, fault, begun, params, batches):
    step, state = begun(SYNCS[name](), 3, params())
    good, bad = batches(2)
    state, _ = step(state, step.place(good))
    before = jax.device_get(state)
    if fault == "empty":
        bad["weight"][:] = 0
    else:
        # the last row belongs to the last device; one element of one leaf is enough
        bad["weight"][-1], bad["x"][-1, 0] = 1, np.float32(fault)
    state, metrics = step(state, step.place(bad))
    assert metrics["skipped" if fault == "empty" else "nonfinite"] == 1
    after = jax.device_get(state)
    assert np.abs(before.sync_state["residual"]["a"]).max() > 0
    for part in ("params", "sync_state", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(before, part), getattr(after, part))
    state, metrics = step(state, step.place(good))
    assert metrics["nonfinite_run"] == 0
    assert np.isfinite(metrics["grad_norm"])


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_although_it_is_not_sent(fault, synced, rng):
    def nothing(leaves, start, axis_name):
        return [jnp.zeros_like(x) for x in leaves], leaves, start

    silent = Compressor(
        lambda leaf: leaf.ndim > 0, lambda leaves: (), nothing, lambda leaves, n: ()
    )
    grads = {"w": rng.normal(size=(3, 5)).astype(np.float32), "b": np.ones(3, np.float32)}
    update = synced(error_feedback(silent), 3)
    state = update.blank({"w": grads["w"][0], "b": np.float32(1)})
    summed, _ = update(grads, np.float32(1), state)
    assert not summed["w"].any()
    grads["w"][2, 4] = fault
    summed, _ = update(grads, np.float32(1), state)
    assert np.isnan(summed["w"]).all()
    assert summed["b"] == 3


@pytest.mark.parametrize("name", SYNCS)
def test_an_overflow_after_the_flag_is_seen(name, synced, rng):
    """Gradients and residuals are finite, their sum on one device is not."""
    grads = {"w": rng.normal(size=(2, 8, 9)).astype(np.float32)}
    update = synced(SYNCS[name](), 2)
    state = update.blank({"w": grads["w"][0]})
    grads["w"][1, 2, 3] = state["residual"]["w"][1, 2, 3] = 3e38
    summed, _ = update(grads, np.float32(1), state)
    assert not np.isfinite(summed["w"]).all()


@pytest.mark.parametrize("name", SYNCS)
def test_law_2_and_training_converges(name, trained, params, batches):
    """Replicas are compared to the bit by `trained`."""
    start, stream = params(), batches(4) * 15
    _, plain = trained(all_reduce_sync(), 4, start, stream, microbatches=2)
    _, rows = trained(SYNCS[name](), 4, start, stream, microbatches=2)
    assert [row["weight"] for row in rows] == [row["weight"] for row in plain]
    gained = plain[0]["loss"] - plain[-4]["loss"]
    assert rows[-4]["loss"] < rows[0]["loss"] - 0.5 * gained


@pytest.mark.parametrize("name", SYNCS)
def test_one_device_leaves_nothing_out_and_pays_what_it_owes(name, synced, params, rng):
    start = params()
    update = synced(SYNCS[name](), 1)
    state = update.blank(start)
    owed = jax.tree.map(lambda e: rng.normal(size=e.shape).astype(e.dtype), state["residual"])
    grads = random_grads(rng, start, 1)
    summed, state = update(grads, np.float32(7), {**state, "residual": owed})
    for key in start:
        expected = grads[key][0] + (0 if owed[key] is None else 7 * owed[key][0])
        np.testing.assert_allclose(summed[key], expected, rtol=1e-5, atol=1e-5)
    assert not any(leaf.any() for leaf in jax.tree.leaves(state["residual"]))


def test_respread_keeps_the_total(rng):
    residual = {"a": rng.normal(size=(4, 3, 5)).astype(np.float32), "b": None}
    start = (np.stack([rng.normal(size=(5, 2))] * 4),)
    for n in (1, 3, 8):
        new = respread({"residual": residual, "start": start}, n)
        assert new["residual"]["a"].shape == (n, 3, 5)
        assert new["residual"]["a"].dtype == np.float32
        np.testing.assert_allclose(new["residual"]["a"].sum(0), residual["a"].sum(0), atol=1e-5)
        assert new["start"][0].shape == (n, 5, 2)
        np.testing.assert_array_equal(new["start"][0][-1], start[0][0])


def test_the_configuration_makes_it():
    from jaxdp.assemble import make_sync

    for name, key in (("top_k", "top_k_fraction"), ("power_sgd", "power_sgd_rank")):
        given = [("sync.compression", name), (f"sync.{key}", 1), ("sync.algorithm", "ring")]
        sync = make_sync(load_config(None, given))
        sums = {
            "grads": {"w": jax.ShapeDtypeStruct((20, 30), np.float32)},
            "model_state": {},
            "scalars": {"loss": jax.ShapeDtypeStruct((2,), np.float32)},
        }
        plan = sync.plan(sums, 2)
        assert {one.kind for one in plan.collectives} == {"collective-permute"}
        # each half of the ring sends half a vector; fraction 1 sends all: 600 values and places
        numbers = {"top_k": 600 * 2, "power_sgd": 20 + 30}[name]
        assert plan.sent_bytes == 4 * (numbers + 2 * -(-3 // 2))

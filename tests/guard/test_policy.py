"""The policies in the loop: replicas that differ, and steps that are not finite."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import LossOut, all_reduce_sync, fit, make_train_step
from jaxdp.checkpoints import Checkpoints
from jaxdp.errors import NumericsError
from jaxdp.guard import Guard, compare_replicas
from jaxdp.loop import Every

STEPS, WIDTH = 24, 6


def loss(params, model_state, batch, keys):
    out = jnp.tanh(batch["x"] @ params["a"]) @ params["c"]
    kept = {"mean": 0.9 * model_state["mean"] + 0.1 * out.mean()}
    return LossOut(((out - batch["y"]) ** 2).sum(), jnp.float32(len(out)), {}, kept)


@dataclass
class Batches:
    """Random batches; in those of `bad`, numbered from 1, the last device gets a NaN."""

    seed: int
    bad: tuple[int, ...] = ()

    def batch(self, t):
        rng = np.random.default_rng([self.seed, t])
        x = rng.normal(size=(24, 5)).astype(np.float32)
        if t + 1 in self.bad:
            x[-1, 2] = np.nan
        return {"x": x, "y": rng.normal(size=24).astype(np.float32)}


def make(mesh, rng, algorithm="psum", **options):
    step = make_train_step(loss, optax.adamw(0.05), all_reduce_sync(algorithm), mesh, **options)
    params = {"a": rng.normal(size=(5, WIDTH)), "c": rng.normal(size=WIDTH)}
    params = jax.tree.map(np.float32, params)
    return step, lambda: step.init(params, {"mean": np.float32(0.5)})


def train(
    step, state, batches, folder, *, stop=10**6, lines=None, every=5, keep=3, **guard_options
):
    """A run that saves every fourth step in `folder` and goes on from what is there.

    It is stopped after `stop` steps, those that are done again after going back included.
    """
    lines = [] if lines is None else lines
    with Checkpoints(folder, keep) as checkpoints:

        def restore(at_most, like):
            checkpoints.wait()
            if not any(at_most is None or step <= at_most for step in checkpoints.steps()):
                return None
            return checkpoints.restore(like, at_most)[0]

        guard = Guard(every=every, restore=restore, tell=lines.append, **guard_options)
        if checkpoints.steps():
            state, meta, _ = checkpoints.restore(state)
            guard.resume(meta)
        calls = iter(range(10**6 + 1))
        result = fit(
            step,
            state,
            batches,
            STEPS,
            save=Every(4, lambda t, state: checkpoints.save(t, state, guard.record())),
            guard=guard,
            should_stop=lambda: next(calls) >= stop,
        )
    return result.state, guard


def disturbed(step, disturb):
    """The step with a state that `disturb` may change before it is used."""

    class Run:
        def lower(self, *args):
            self.compiled = step.run.lower(*args).compile()
            return self

        def compile(self):
            return lambda state, batch: self.compiled(disturb(state), batch)

    return replace(step, run=Run())


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


def without_counts(state):
    return state._replace(nonfinite=0, nonfinite_run=0)


def by_hand(step, state, batches, missing):
    """The straight run in which the steps of `missing` only move the step's number on."""
    for t in range(STEPS):
        if t + 1 in missing:
            state = state._replace(step=jax.device_put(np.int32(t + 1), state.step.sharding))
        else:
            state, _ = step(state, step.place(batches.batch(t)))
    return state


@pytest.mark.parametrize("n", [2, 3])
def test_r2_a_flip_stops_the_run_at_the_next_comparison(n, mesh_of, rng, flip, tmp_path):
    step, init = make(mesh_of(n), rng)
    at, replica, bit = int(rng.integers(20)), int(rng.integers(n)), int(rng.integers(12, 22))

    def disturb(state):
        return flip(state, "params/a", replica, bit) if int(state.step) == at else state

    found = min(5 * (at // 5 + 1), 4 * (at // 4 + 1))  # before a save too
    who = "replicas 0 and 1" if n == 2 else f"replica {replica} of 3"
    with pytest.raises(NumericsError, match=rf"after step {found}: .*params/a on {who}"):
        train(disturbed(step, disturb), init(), Batches(1), tmp_path / "c")
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert all(saved <= at for saved in checkpoints.steps())


def test_replicas_that_differ_are_refused_at_the_start(mesh_of, rng, flip):
    step, init = make(mesh_of(4), rng)
    with pytest.raises(NumericsError, match="after step 0: params/c on replica 2 of 4"):
        fit(step, flip(init(), "params/c", 2, 5), Batches(1), STEPS, guard=Guard(every=0))


def test_r2_rolled_back_it_is_the_run_without_the_flip(mesh_of, rng, flip, tmp_path):
    step, init = make(mesh_of(3), rng)
    straight, _ = train(step, init(), Batches(2), tmp_path / "a")
    flips, lines = [int(rng.integers(8, 20))], []

    def disturb(state):
        if int(state.step) in flips:
            flips.remove(int(state.step))
            return flip(state, "params/a", 1, 20)
        return state

    state, guard = train(
        disturbed(step, disturb), init(), Batches(2), tmp_path / "b", divergence="rollback",
        lines=lines,
    )  # fmt: skip
    assert_same(state, straight)
    [back] = guard.rollbacks
    assert back["why"] == "divergence"
    [line] = lines
    assert line.endswith(f"going on from the checkpoint of step {back['to']}")


def test_r2_the_same_step_again_stops(mesh_of, rng, flip, tmp_path):
    step, init = make(mesh_of(3), rng)

    def disturb(state):
        return flip(state, "params/a", 1, 20) if int(state.step) == 12 else state

    with pytest.raises(NumericsError, match=r"after step 15.*going back .* did not help"):
        train(disturbed(step, disturb), init(), Batches(2), tmp_path, divergence="rollback")


@pytest.mark.parametrize("algorithm", ["psum", "ring", "recursive_doubling"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_r3_a_nan_on_one_device_leaves_every_byte_as_it_was(n, algorithm, mesh_of, rng):
    step, init = make(mesh_of(n), rng, algorithm, microbatches=1 if n == 8 else 2)
    batches = Batches(int(rng.integers(1000)), bad=(3,))
    state = init()
    for t in range(2):
        state, _ = step(state, step.place(batches.batch(t)))
    before = jax.device_get(state)
    state, _ = step(state, step.place(batches.batch(2)))
    assert (int(state.step), int(state.nonfinite), int(state.nonfinite_run)) == (3, 1, 1)
    assert_same(without_counts(state)._replace(step=before.step), without_counts(before))
    assert compare_replicas(mesh_of(n), state) == []
    state, _ = step(state, step.place(batches.batch(3)))
    assert (int(state.nonfinite), int(state.nonfinite_run)) == (1, 0)
    assert not np.array_equal(state.params["a"], before.params["a"])


@pytest.mark.parametrize("compute_dtype", [None, "float16"])
def test_r3_statistics_that_overflow_under_a_finite_loss(compute_dtype, mesh_of, rng):
    def overflows(params, model_state, batch, keys):
        out = loss(params, model_state, batch, keys)
        largest = jnp.abs(batch["x"]).max().astype(jnp.float32)
        return out._replace(model_state={"mean": largest**2})

    mesh = mesh_of(3)
    options = {"compute_dtype": compute_dtype}
    step = make_train_step(overflows, optax.adamw(0.05), all_reduce_sync(), mesh, **options)
    _, init = make(mesh, rng)
    batch = Batches(int(rng.integers(1000))).batch(0)
    state = step.init(init().params, {"mean": np.float32(0.5)})
    before = jax.device_get(state)
    batch["x"][int(rng.integers(24)), 1] = 1e25  # tanh makes it 1; its square is infinite
    state, metrics = step(state, step.place(batch))
    assert np.isfinite(metrics["loss"])
    assert (int(state.nonfinite), int(state.step), compare_replicas(mesh, state)) == (1, 1, [])
    assert_same(without_counts(state)._replace(step=before.step), without_counts(before))


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_r3_a_nan_is_seen_through_every_wire(wire, mesh_of, rng):
    mesh = mesh_of(4)
    sync = all_reduce_sync("all_to_all", wire=wire)
    step = make_train_step(loss, optax.adamw(0.05), sync, mesh)
    _, init = make(mesh, rng)
    before = jax.device_get(state := init())
    batches = Batches(int(rng.integers(1000)), bad=(1,))
    state, _ = step(state, step.place(batches.batch(0)))
    assert (int(state.nonfinite), compare_replicas(mesh, state)) == (1, [])
    assert_same(state.params, before.params)
    assert_same(state.opt_state, before.opt_state)


def test_r3_skipped_steps_are_told_and_only_move_the_data_on(mesh_of, rng, tmp_path):
    step, init = make(mesh_of(4), rng)
    batches, lines = Batches(3, bad=(2, 7, 8, 9, 17)), []
    state, guard = train(step, init(), batches, tmp_path, nonfinite="skip", limit=3, lines=lines)
    assert int(state.nonfinite) == 5
    assert guard.left_out == set()
    assert_same(without_counts(state), without_counts(by_hand(step, init(), batches, batches.bad)))
    told = [line.split(":")[0] for line in lines]
    assert told == ["step 2", "step 7", "step 8", "step 9", "step 17"]
    assert "(3 in a row, at most 3 are skipped)" in lines[3]


def test_r4_too_many_in_a_row_stop(mesh_of, rng, tmp_path):
    step, init = make(mesh_of(2), rng)
    batches = Batches(3, bad=tuple(range(6, 18)))
    with pytest.raises(NumericsError, match=r"in the 6 steps from 6 to 11, more than guard.limit"):
        train(step, init(), batches, tmp_path / "a", nonfinite="skip")
    # going back leaves out six of the twelve; the next update fails as well
    with pytest.raises(NumericsError, match=r"from 12 to 17.*going back .* did not help"):
        train(step, init(), batches, tmp_path / "b", nonfinite="rollback")
    early = Batches(3, bad=tuple(range(2, 14)))
    with pytest.raises(NumericsError, match=r"from 2 to 7.*no checkpoint from before"):
        train(step, init(), early, tmp_path / "c", nonfinite="rollback")


@pytest.mark.parametrize("stop", [5, 9, 12, 14, 16, 18, 24, 27])
def test_r4_rolled_back_stopped_and_resumed_is_the_straight_run(stop, mesh_of, rng, tmp_path):
    step, init = make(mesh_of(3), rng)
    batches, policy = Batches(4, bad=(3, *range(10, 16), 19)), {"nonfinite": "rollback"}
    lines = []
    straight, guard = train(step, init(), batches, tmp_path / "a", lines=lines, **policy)
    assert guard.left_out == set(range(10, 16))
    assert guard.rollbacks == [{"step": 10, "to": 8, "why": "nonfinite"}]
    assert any("step 8, without the batches of steps 10 to 15" in line for line in lines)
    by_hand_state = by_hand(step, init(), batches, batches.bad)
    assert_same(without_counts(straight), without_counts(by_hand_state))

    half, _ = train(step, init(), batches, tmp_path / "b", stop=stop, **policy)
    assert int(half.step) < STEPS
    rest, again = train(step, init(), batches, tmp_path / "b", **policy)
    assert_same(rest, straight)
    assert again.left_out == guard.left_out


def test_r4_stopped_amid_failing_steps_one_checkpoint_is_enough(mesh_of, rng, tmp_path):
    step, init = make(mesh_of(2), rng)
    batches, policy = Batches(4, bad=tuple(range(10, 16))), {"nonfinite": "rollback", "keep": 1}
    for stop in (12, 2):  # the second comes no further than the first
        half, _ = train(step, init(), batches, tmp_path, stop=stop, **policy)
        assert int(half.nonfinite_run) > 0
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.steps() == [9]
    state, guard = train(step, init(), batches, tmp_path, **policy)
    assert guard.rollbacks == [{"step": 10, "to": 9, "why": "nonfinite"}]
    expected = by_hand(step, init(), batches, guard.left_out)
    assert_same(without_counts(state), without_counts(expected))


def test_a_damaged_state_is_healed_by_going_back_and_not_by_skipping(
    mesh_of, rng, change, tmp_path
):
    step, init = make(mesh_of(2), rng)
    damages = []

    def disturb(state):
        if int(state.step) == 12 and not damages:
            damages.append(12)
            return change(state, "params/c", lambda leaf: leaf * np.nan)
        return state

    with pytest.raises(NumericsError, match="from 13 to 18"):
        train(disturbed(step, disturb), init(), Batches(5), tmp_path / "a", nonfinite="skip")
    damages.clear()
    state, guard = train(
        disturbed(step, disturb), init(), Batches(5), tmp_path / "b", nonfinite="rollback"
    )
    assert guard.left_out == set(range(13, 19))
    expected = by_hand(step, init(), Batches(5), guard.left_out)
    assert_same(without_counts(state), without_counts(expected))

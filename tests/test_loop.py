"""The loop: order, lateness, pauses, ends."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import all_reduce_sync, fit, make_train_step
from jaxdp.errors import NumericsError
from jaxdp.loop import Every


def loss(params, model_state, batch, keys):
    return (params["w"] * batch["g"]).sum(), jnp.float32(batch["g"].shape[0])


class Batches:
    """Batch t holds t, whatever example."""

    def __init__(self, bad_step=None):
        self.bad_step = bad_step

    def batch(self, step):
        value = np.nan if step == self.bad_step else step
        return {"g": np.full(4, value, np.float32)}


def test_an_evaluation_that_fails_at_the_end_does_not_lose_the_training(step):
    def fails(t, state):
        raise MemoryError("so many logits")

    saved = []
    with pytest.raises(MemoryError):
        fit(
            step,
            step.init({"w": np.float32(0)}),
            Batches(),
            4,
            evaluate=Every(0, fails),
            save=Every(0, lambda t, state: saved.append((t, float(state.params["w"])))),
        )
    assert saved == [(4, -sum(range(4)))]


@pytest.fixture
def step(mesh_of):
    return make_train_step(loss, optax.sgd(1.0), all_reduce_sync(), mesh_of(2))


def test_hooks_are_called_when_due_and_at_the_end(step):
    calls = {"log": [], "evaluate": [], "save": []}

    def hook(name):
        return lambda t, value: calls[name].append((t, value)) or {"t": t}

    result = fit(
        step,
        step.init({"w": np.float32(0)}),
        Batches(),
        10,
        log=Every(3, hook("log")),
        evaluate=Every(4, hook("evaluate")),
        save=Every(0, hook("save")),
    )
    assert [t for t, _ in calls["log"]] == [3, 6, 9, 10]
    assert [t for t, _ in calls["evaluate"]] == [4, 8, 10]
    assert [t for t, _ in calls["save"]] == [10]
    # step t trains on the number t with rate 1: w is minus the sum of what it has seen
    assert [row["grad_norm"] for _, row in calls["log"]] == [2, 5, 8, 9]
    assert float(result.state.params["w"]) == -sum(range(10))
    assert result.evaluation == {"t": 10}
    assert result.step == 10
    assert result.compiled is not None


def test_going_on_from_a_state_sees_the_same_stream(step):
    straight = fit(step, step.init({"w": np.float32(0)}), Batches(), 9)
    half = fit(step, step.init({"w": np.float32(0)}), Batches(), 4)
    rest = fit(step, half.state, Batches(), 9)
    assert float(rest.state.params["w"]) == float(straight.state.params["w"])
    assert fit(step, rest.state, Batches(), 9).compiled is None  # nothing left to do


def test_a_stop_saves_what_was_done(step):
    saved = []
    stops = iter([False] * 5 + [True])
    result = fit(
        step,
        step.init({"w": np.float32(0)}),
        Batches(),
        100,
        save=Every(0, lambda t, state: saved.append((t, float(state.params["w"])))),
        should_stop=lambda: next(stops),
    )
    assert result.step == 5
    assert saved == [(5, -sum(range(5)))]


def test_numbers_that_are_not_finite_end_the_run(step):
    rows = []
    with pytest.raises(NumericsError, match=r"not finite in 1 step up to step 10"):
        fit(
            step,
            step.init({"w": np.float32(0)}),
            Batches(bad_step=7),
            100,
            log=Every(5, lambda t, row: rows.append(t)),
        )
    assert rows == [5, 10]


def test_they_end_it_without_a_log_and_at_a_save_between_two_rows(step):
    with pytest.raises(NumericsError, match="up to step 12"):
        fit(step, step.init({"w": np.float32(0)}), Batches(bad_step=7), 12)
    # step 8 is due to be saved and is the one that failed; the next row would be of step 50
    hooks = {"log": Every(50, print), "save": Every(4, lambda t, state: None)}
    with pytest.raises(NumericsError, match="up to step 8"):
        fit(step, step.init({"w": np.float32(0)}), Batches(bad_step=7), 100, **hooks)


def test_a_step_that_was_not_finite_is_not_saved_and_is_forgiven_later(step):
    saved = []
    save = Every(4, lambda t, state: saved.append((t, jax.tree.map(jnp.copy, state))))
    with pytest.raises(NumericsError, match="up to step 8"):
        fit(step, step.init({"w": np.float32(0)}), Batches(bad_step=5), 100, save=save)
    [(t, state)] = saved
    assert t == 4
    assert fit(step, state._replace(nonfinite=state.nonfinite + 1), Batches(), 12).step == 12


def test_an_error_in_the_data_is_raised_and_leaves_no_thread(step):
    class Broken(Batches):
        def batch(self, step):
            if step == 3:
                raise ValueError("record 12 is damaged")
            return super().batch(step)

    before = threading.active_count()
    with pytest.raises(ValueError, match="record 12"):
        fit(step, step.init({"w": np.float32(0)}), Broken(), 10)
    assert threading.active_count() == before


def test_n2_twice_in_one_process_and_interrupted_in_between(step):
    before = threading.active_count()

    def interrupt(t, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(step, step.init({"w": np.float32(0)}), Batches(), 10, log=Every(2, interrupt))
    assert threading.active_count() == before
    result = fit(step, step.init({"w": np.float32(0)}), Batches(), 10)
    assert float(result.state.params["w"]) == -sum(range(10))


def test_l2_step_time_is_that_of_the_work_not_of_the_dispatch(mesh_of):
    def wait(x):
        time.sleep(0.03)
        return x

    def slow(params, model_state, batch, keys):
        total, weight = loss(params, model_state, batch, keys)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return total, jax.pure_callback(wait, shape, weight)

    step = make_train_step(slow, optax.sgd(1.0), all_reduce_sync(), mesh_of(1))
    rows = []
    log = Every(4, lambda t, row: rows.append(row))
    result = fit(step, step.init({"w": np.float32(0)}), Batches(), 12, log=log)
    assert all(row["step_time_s"] >= 0.03 for row in rows[1:])
    assert result.train_s >= 12 * 0.03
    assert result.waited_s < 0.03


def test_waiting_for_input_is_known(step):
    class Slow(Batches):
        def batch(self, t):
            time.sleep(0.02)
            return super().batch(t)

    result = fit(step, step.init({"w": np.float32(0)}), Slow(), 12)
    assert 12 * 0.01 <= result.waited_s <= result.train_s


def test_l2_evaluation_and_saving_are_not_part_of_a_step(step, monkeypatch):
    real, jump = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + jump[0])

    def long(t, state):
        jump[0] += 1000
        return {}

    rows = []
    result = fit(
        step,
        step.init({"w": np.float32(0)}),
        Batches(),
        12,
        log=Every(4, lambda t, row: rows.append(row)),
        evaluate=Every(3, long),
        save=Every(5, long),
    )
    assert jump[0] == 7000
    assert max(row["step_time_s"] for row in rows) < 100
    assert result.train_s < 100

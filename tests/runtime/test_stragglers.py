"""Who keeps the others waiting is found from what each process spends by itself."""

import re
import time

import numpy as np
import optax
import pytest

from jaxdp import all_reduce_sync, fit, make_train_step
from jaxdp.loop import Every
from jaxdp.runtime.stragglers import Own, Stragglers, find_straggler


@pytest.fixture
def even(rng):
    """n -> n ranks about equally fast: steps of 50 to 60 ms, a few of them their own."""

    def make(n):
        return [Own(*rng.uniform((0.05, 0.002, 0.002), (0.06, 0.004, 0.004))) for _ in range(n)]

    return make


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("phase", "told"),
    [("input_s", "waiting for its input"), ("host_s", "in its code on the host")],
)
def test_p11_a_rank_200_ms_slower_is_named_with_its_phase(ranks, phase, told, even, rng):
    own, who = even(ranks), int(rng.integers(ranks))
    assert find_straggler(own) is None
    slow = getattr(own[who], phase) + 0.2
    own[who] = own[who]._replace(**{phase: slow})
    # the others wait for it in the collective: all steps take as long
    own = [one._replace(step_s=one.step_s + 0.2) for one in own]
    found = find_straggler(own)
    assert (found.rank, found.phase, found.seconds) == (who, phase, slow)
    others = [getattr(one, phase) for r, one in enumerate(own) if r != who]
    assert found.others_s == pytest.approx(np.median(others))
    assert f"rank {who} of {ranks} spends {1e3 * slow:.0f} ms a step {told}" in found.describe(
        ranks
    )


def test_what_delays_nobody_much_is_not_told(even):
    # twice the others and 4 ms more; 20 ms more than the others in a step of a second
    assert find_straggler([Own(0.02, 0.0, 0.001), Own(0.02, 0.004, 0.001)]) is None
    assert find_straggler([Own(1.0, 0.0, 0.001), Own(1.0, 0.02, 0.001)]) is None
    # a third more than the others, who are slow as well
    assert find_straggler([Own(1.0, 0.6, 0.0), Own(1.0, 0.8, 0.0), Own(1.0, 0.6, 0.0)]) is None
    assert find_straggler(even(1)) is None


def test_a_straggler_is_told_once_when_it_stays_one(even):
    fast, slow = even(3), even(3)
    slow[2] = slow[2]._replace(input_s=0.3)
    other = even(3)
    other[0] = other[0]._replace(input_s=0.3)
    lines, script = [], iter([slow, slow, fast, slow, slow, other, *[slow] * 9, fast, *[slow] * 3])
    stragglers = Stragglers(lines.append, lambda own: next(script))
    told = []
    for step in range(1, 20):
        stragglers.compare(step, fast[0])
        told += [step] * (len(lines) - len(told))
    assert told == [9, 19]
    assert lines[0].startswith("step 9  straggler: rank 2 of 3 spends 300 ms")
    silent = Stragglers(lines.append, lambda own: None)  # of another rank than 0
    silent.compare(1, fast[0])
    assert len(lines) == 2


class Batches:
    def __init__(self, pause_s=0.0):
        self.pause_s = pause_s

    def batch(self, step):
        time.sleep(self.pause_s)
        return {"g": np.full(4, step, np.float32)}


def test_the_loop_knows_what_a_step_takes_the_process_itself(mesh_of, monkeypatch):
    def loss(params, model_state, batch, keys):
        return (params["w"] * batch["g"]).sum(), np.float32(4)

    step = make_train_step(loss, optax.sgd(1.0), all_reduce_sync(), mesh_of(2))
    real, jump = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + jump[0])

    def long(t, value):
        jump[0] += 1000
        return {}

    def measured(batches, **hooks):
        found = []
        stragglers = Every(4, lambda t, own: found.append((t, own)))
        state = step.init({"w": np.float32(0)})
        fit(step, state, batches, 12, stragglers=stragglers, **hooks)
        assert [t for t, _ in found] == [4, 8, 12]
        return found[1][1]

    slow_input = measured(Batches(0.05))
    assert slow_input.step_s >= slow_input.input_s >= 0.03
    # a hook of one step in four is of the loop's own code; an evaluation is of no step
    slow_host = measured(Batches(), log=Every(4, long))
    assert slow_host.step_s >= slow_host.host_s >= 250
    assert slow_host.input_s < 100
    assert max(measured(Batches(), evaluate=Every(4, long))) < 100


def test_p11_in_a_job_rank_0_tells_who_is_slow(start_processes, tmp_path):
    words = (
        "--devices", 2, "--model.hidden", "[8]", "--steps", 12, "--log.every", 2, "--eval.every", 0,
        "--checkpoint.every", 0, "--log.progress", "plain", "--out", tmp_path / "run",
    )  # fmt: skip
    job = start_processes("-m", "jaxdp.train", *words, JAXDP_FAULTS="1:*:input:slow:0.2")
    first, second = job.wait()
    assert (first.code, second.code, second.out) == (0, 0, ""), first.err + second.err
    [line] = [line for line in first.out.splitlines() if "straggler" in line]
    assert re.search(
        r"rank 1 of 2 spends \d+ ms a step waiting for its input, the other \d+ ms", line
    )

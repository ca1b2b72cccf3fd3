"""When a job is started again: decided from the ends of its attempts alone."""

import pytest

from jaxdp.runtime.restarting import End, History, Rules, decide


def follow(rules, ends):
    """The decisions after one end after the other."""
    history, decisions = History(rules.nproc), []
    for end in ends:
        decisions.append(decide(rules, history, end))
        history = decisions[-1].history
    return decisions


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 75])
def test_codes_that_another_try_cannot_change(code):
    assert decide(Rules(3, 2), History(2), End(code)).delay_s is None


@pytest.mark.parametrize("code", [1, 6, 7, 134, 137])
def test_faults_are_restarted_at_first_at_once(code):
    found = decide(Rules(3, 2), History(2), End(code))
    assert found.delay_s == 0
    assert found.why == "2 of 3 left"


def test_delays_grow_to_a_bound():
    ends = [End(6, "start", 0)] * 10
    delays = [d.delay_s for d in follow(Rules(9, 2), ends)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 32, 32, None]


def test_the_budget_is_for_restarts_without_progress(rng):
    steps = sorted(rng.choice(1000, 8, replace=False) + 1)
    *found, _ = follow(Rules(1, 2), [End(137, "step", s, s) for s in map(int, steps)] + [End(0)])
    assert [d.delay_s for d in found] == [0.0] * 8
    stuck = follow(Rules(1, 2), [End(137, "step", 9, 9), End(137, "step", 5, 9)])
    assert stuck[1].delay_s is None
    assert stuck[1].why == "all 1 restarts were used without progress"


def test_p9_the_same_step_three_times_in_a_row():
    found = follow(Rules(99, 2), [End(1, "step", 7, 7)] * 3)
    assert [d.delay_s for d in found] == [0, 1, None] or [d.delay_s for d in found] == [0, 0, None]
    assert found[-1].why == "it failed 3 times in a row at step 7"


def test_another_step_between_starts_the_count_anew():
    ends = [End(1, "step", s, 7) for s in (7, 7, 5, 7, 7)]
    assert all(d.delay_s is not None for d in follow(Rules(99, 2), ends))


def test_a_start_that_fails_is_no_step_that_fails():
    ends = [End(6, "start", 40, 40)] * 5
    assert all(d.delay_s is not None for d in follow(Rules(99, 2), ends))


def test_no_restarts():
    assert decide(Rules(0, 2), History(2), End(1)).why == "--max-restarts is 0"


def test_fewer_processes_after_a_restart_that_came_to_nothing():
    rules = Rules(9, 4, min_nproc=2)
    found = follow(rules, [End(6, "start", 0)] * 6)
    assert [d.history.nproc for d in found] == [4, 3, 2, 2, 2, 2]
    assert [d.history.nproc for d in follow(Rules(9, 4), [End(6)] * 4)] == [4] * 4


def test_a_count_that_is_refused_costs_no_restart():
    rules = Rules(3, 4, min_nproc=2)
    ends = [End(6, "start", 0), End(6, "start", 0), End(2)]
    *_, shrunk, refused = follow(rules, ends)
    assert (shrunk.history.nproc, refused.history.nproc) == (3, 2)
    assert refused.delay_s == 0
    assert refused.history.used == shrunk.history.used
    assert decide(rules, refused.history, End(2)).delay_s is None


def test_after_a_failure_with_progress_the_next_has_all_processes():
    rules = Rules(3, 4, min_nproc=2)
    found = follow(rules, [End(137, "step", 5, 5), End(137, "step", 9, 9)])
    assert [d.history.nproc for d in found] == [4, 4]

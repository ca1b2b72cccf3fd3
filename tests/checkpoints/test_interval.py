"""How often to save: against the expected time of a run, minimised by trying."""

import math

import numpy as np
import pytest

from jaxdp.checkpoints.interval import best_interval_s, steps_between


def expected_s(interval, save, failure):
    """Time per second of work where failures are a Poisson process and restarts are free."""
    return failure * np.expm1((interval + save) / failure) / interval


@pytest.mark.parametrize("save", [0.01, 1.0, 30.0, 600.0])
@pytest.mark.parametrize("failure", [600.0, 3600.0, 1e6])
def test_no_other_interval_is_much_better(save, failure):
    interval = best_interval_s(save, failure)
    tried = np.geomspace(1e-2, 1e7, 20_000)
    with np.errstate(over="ignore"):
        best = expected_s(tried, save, failure).min()
    assert expected_s(interval, save, failure) <= best * 1.02
    assert interval == pytest.approx(math.sqrt(2 * save * failure), rel=0.6)


def test_where_saving_takes_longer_than_a_machine_lives():
    assert best_interval_s(100.0, 50.0) == 50.0
    assert best_interval_s(0.0, 3600.0) == best_interval_s(1e-3, 3600.0)


def test_steps():
    assert steps_between(0.5, 0.0, 86_400, 0.1) == 2936
    assert steps_between(0.5, 400.0, 86_400, 0.1) == 4000  # no save before the last is on disk
    assert steps_between(0.5, 0.0, 86_400, 1e6) == 1
    assert steps_between(0.5, 0.0, 86_400, 0.1, multiple_of=1000) == 3000

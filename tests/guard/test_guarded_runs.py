"""The guard's section of a configuration, in whole runs."""

import json

import pytest

from jaxdp import load_config, run_training
from jaxdp.errors import NumericsError
from jaxdp.report.progress import SilentReporter


class Lines(SilentReporter):
    """Keeps what it is told."""

    def __init__(self):
        self.lines = []

    def line(self, text):
        self.lines.append(text)


def run(out, *, reporter=None, should_stop=lambda: False, **keys):
    given = {
        "out": str(out), "steps": 24, "devices": 4, "model.hidden": (16,), "log.every": 2,
        "eval.every": 12, "checkpoint.every": 6,
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in keys.items()}
    return run_training(load_config(None, list(given.items())), reporter, should_stop)


def logged_steps(out):
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_r3_the_default_stops_and_the_checkpoint_before_is_kept(poison, tmp_path):
    poison(9)
    with pytest.raises(NumericsError, match=r"not finite in 1 step up to step 10"):
        run(tmp_path / "a")
    saved = [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()]
    assert saved == ["6"]


def test_r3_skip_counts_and_tells(poison, tmp_path):
    poison(3, 4, 24)
    reporter = Lines()
    summary = run(tmp_path / "a", reporter=reporter, guard__nonfinite="skip")
    assert (summary["nonfinite"], summary["left_out"], summary["rollbacks"]) == (3, [], [])
    assert sum("changed nothing" in line for line in reporter.lines) == 3


def test_r4_rollback_is_recorded_and_the_same_after_a_resume(poison, tmp_path):
    poison(*range(9, 12))
    keys = {"guard__nonfinite": "rollback", "guard__limit": 2}
    straight = run(tmp_path / "a", **keys)
    assert straight["left_out"] == [9, 10, 11]
    assert straight["nonfinite"] == 3  # going back does not make them unseen
    assert straight["rollbacks"] == [{"step": 9, "to": 6, "why": "nonfinite"}]
    # one line per logged step, but for the step that was left out
    assert logged_steps(tmp_path / "a") == [2, 4, 6, 8, *range(12, 25, 2)]
    for stop in (10, 15):
        stops = iter([False] * stop + [True])
        out = tmp_path / str(stop)
        assert run(out, should_stop=lambda stops=stops: next(stops), **keys)["stopped"]
        rest = run(out, resume=True, **keys)
        assert rest["params_digest"] == straight["params_digest"]
        assert rest["left_out"] == straight["left_out"]
        assert logged_steps(out) == logged_steps(tmp_path / "a")


def test_the_policies_may_change_at_a_resume(poison, tmp_path):
    poison(9)
    with pytest.raises(NumericsError):
        run(tmp_path / "a")
    reporter = Lines()
    assert run(tmp_path / "a", resume=True, guard__nonfinite="skip", reporter=reporter)["steps"]
    assert "resuming with guard.nonfinite skip instead of stop" in reporter.lines


def test_float16_stopped_and_resumed_is_the_straight_run(tmp_path):
    keys = {"compute_dtype": "float16", "optimizer__learning_rate": 3e-3}
    straight = run(tmp_path / "a", **keys)
    stops = iter([False] * 8 + [True])
    run(tmp_path / "b", should_stop=lambda: next(stops), **keys)
    rest = run(tmp_path / "b", resume=True, **keys)
    assert rest["params_digest"] == straight["params_digest"]
    assert rest["overflows"] == straight["overflows"]
    plain = run(tmp_path / "c", optimizer__learning_rate=3e-3)
    assert "overflows" not in plain
    assert straight["eval"]["loss"] == pytest.approx(plain["eval"]["loss"], rel=0.1)

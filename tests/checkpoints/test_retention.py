"""Which checkpoints are deleted, for all small histories of a run."""

import itertools
import math

import pytest

from jaxdp.checkpoints.retention import Keep, most_at_once, steps_to_delete

NAN = math.nan
RULES = [
    Keep(*rule) for rule in itertools.product([1, 2, 3], [None, "loss", "accuracy"], [None, 3])
]


def kept_by(values, keep):
    """What the rules say, step by step: an oracle that is slow and has no cleverness."""
    steps, kept = sorted(values), set()
    for step in steps:
        newer = [s for s in steps if s > step]
        if len(newer) < keep.newest:
            kept.add(step)
        others = [x for x in values.values() if x is not None and not math.isnan(x)]
        value = values[step]
        if keep.best and value in others:
            best = min(others) if keep.best == "loss" else max(others)
            if value == best and not any(values[s] == best for s in newer):
                kept.add(step)
        if keep.every and step >= keep.every:
            multiple = step - step % keep.every
            if not any(multiple <= s < step for s in steps):
                kept.add(step)
    return kept


@pytest.mark.parametrize("keep", RULES, ids=str)
def test_every_small_history(keep):
    for steps in ((), (2,), (1, 2), (2, 3, 4), (3, 5, 6), (1, 4, 8, 9)):
        for values in itertools.product([None, NAN, 0.25, 0.5, -math.inf], repeat=len(steps)):
            history = dict(zip(steps, values, strict=True))
            deleted = steps_to_delete(history, keep)
            assert deleted == sorted(set(steps) - kept_by(history, keep))
            left = {step: x for step, x in history.items() if step not in deleted}
            assert steps_to_delete(left, keep) == []  # nothing follows from deleting
            if steps:
                assert steps[-1] in left


def test_c9_a_metric_that_gets_worse_and_one_that_is_nan():
    history = {}
    for step in range(1, 9):
        history[step] = float(step) if step % 2 else NAN
        for old in steps_to_delete(history, Keep(3, "loss")):
            del history[old]
    assert list(history) == [1, 6, 7, 8]
    assert steps_to_delete({1: NAN, 2: NAN, 3: None}, Keep(1, "accuracy")) == [1, 2]


@pytest.mark.parametrize("keep", RULES, ids=str)
@pytest.mark.parametrize(("steps", "every"), [(20, 0), (20, 1), (20, 4), (21, 4), (3, 5)])
def test_no_run_holds_more_than_was_foretold(keep, steps, every, rng):
    """A step is written, then what the rules do not keep goes: as the store does it."""
    history, most = {}, 0
    for step in range(1, steps + 1):
        if step == steps or (every and step % every == 0):
            most = max(most, len(history) + 1)
            history[step] = rng.choice([rng.normal(), NAN])
            for old in steps_to_delete(history, keep):
                del history[old]
    foretold = most_at_once(keep, steps, every)
    assert most <= foretold <= most + 2
    assert foretold <= most_at_once(keep, steps, None)

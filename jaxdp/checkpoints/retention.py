"""Which checkpoints are kept.  Needs no JAX."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

Best = Literal["loss", "accuracy"]


class Keep(NamedTuple):
    """What is kept; a step that any of these keeps is not deleted.

    Attributes:
      newest: so many of the newest steps.
      best: also the step with the lowest loss, or the highest accuracy, on held-out data.
      every: also, for ever, the first step at or after each multiple of it.
    """

    newest: int = 3
    best: Best | None = None
    every: int | None = None


def steps_to_delete(values: Mapping[int, float | None], keep: Keep) -> list[int]:
    """The steps that no rule keeps, oldest first.

    Args:
      values: step -> the metric `keep.best` of it; None where it was not evaluated.
      keep: the rules; at least the newest step is kept whatever they say.

    >>> steps_to_delete({10: 0.9, 20: 0.5, 30: 0.7, 40: 0.8}, Keep(1, "loss"))
    [10, 30]
    >>> steps_to_delete(dict.fromkeys([8, 16, 24, 32]), Keep(1, every=16))
    [8, 24]
    """
    steps = sorted(values)
    kept = {*steps[-max(keep.newest, 1) :], *_best(values, keep), *_for_ever(steps, keep)}
    return [step for step in steps if step not in kept]


def most_at_once(keep: Keep, steps: int, every: int | None) -> int:
    """How many checkpoints a disk has to hold, the one that is being written among them.

    Args:
      keep: the rules.
      steps: of the whole run.
      every: steps between saves, 0 where there is one at the end; None: not known yet.
    """
    kept = keep.newest + (keep.best is not None)
    if keep.every is not None:
        kept += steps // keep.every
    saves = steps if every is None else math.ceil(steps / every) if every else 1
    return min(kept + 1, saves)


def _best(values: Mapping[int, float | None], keep: Keep) -> list[int]:
    """The newest of those with the best value: a NaN is never best."""
    sign = -1 if keep.best == "loss" else 1
    known = {step: sign * x for step, x in values.items() if x is not None and not math.isnan(x)}
    if keep.best is None or not known:
        return []
    return [max(known, key=lambda step: (known[step], step))]


def _for_ever(steps: list[int], keep: Keep) -> list[int]:
    """Of each stretch between multiples, the oldest step: deleting others does not change it."""
    if keep.every is None:
        return []
    oldest: dict[int, int] = {}
    for step in steps:
        oldest.setdefault(step // keep.every, step)
    return [step for stretch, step in oldest.items() if stretch]

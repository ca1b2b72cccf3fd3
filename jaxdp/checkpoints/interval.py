"""How often to save, from what a save costs and how often the job fails.  Needs no JAX."""

import math


def best_interval_s(save_s: float, failure_s: float) -> float:
    """Seconds of training between two saves for which least time is lost.

    What is lost: the saves, and after a failure the work since the last one.  Young's first-order
    answer is sqrt(2 * save_s * failure_s); this is Daly's refinement of it, which also holds where
    saving is not short against the time between failures.

    Args:
      save_s: seconds for which a save stops the training; 0 is taken as a millisecond.
      failure_s: mean seconds between failures of the job, above 0.

    References:
      J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
      J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
      2006: equation 37.

    >>> round(best_interval_s(0.5, 24 * 3600))
    294
    """
    save_s = max(save_s, 1e-3)
    if save_s >= 2 * failure_s:
        return failure_s
    ratio = math.sqrt(save_s / (2 * failure_s))
    return math.sqrt(2 * save_s * failure_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s


def steps_between(
    save_s: float, write_s: float, failure_s: float, step_s: float, multiple_of: int = 1
) -> int:
    """Steps between two saves.

    Args:
      save_s: seconds for which a save stops the training.
      write_s: seconds from its start until it is on disk: the next does not begin before.
      failure_s: mean seconds between failures of the job.
      step_s: seconds of a step.
      multiple_of: the result is rounded up to one of these.
    """
    seconds = max(best_interval_s(save_s, failure_s), write_s)
    steps = max(1, round(seconds / step_s))
    return math.ceil(steps / multiple_of) * multiple_of

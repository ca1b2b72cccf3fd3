"""Saving a run's state: with room asked for, tried again where it fails, as often as it pays."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxdp import peers
from jaxdp.checkpoints import Checkpoints
from jaxdp.checkpoints.agreement import of_the_first
from jaxdp.checkpoints.interval import steps_between
from jaxdp.checkpoints.retention import Keep, most_at_once
from jaxdp.checkpoints.space import check_space, check_writable
from jaxdp.config import Config
from jaxdp.errors import StorageError
from jaxdp.meter import Every
from jaxdp.report.progress import duration
from jaxdp.runtime.joining import tell
from jaxdp.runtime.lease import Lease
from jaxdp.state import TrainState

_DELAYS_S = (1.0, 3.0, 9.0)  # before a save is tried again
_FIRST_AUTO = 10  # steps before the first save whose cost is measured
_MEASURED = 2  # saves: the first one compiles


def keep_rules(config: Config) -> Keep:
    """Which checkpoints a configuration keeps."""
    checkpoint = config.checkpoint
    return Keep(checkpoint.keep, checkpoint.keep_best, checkpoint.keep_every)


def first_interval(config: Config) -> int:
    """Steps between saves, as long as nothing has been measured."""
    every = config.checkpoint.every
    return _rounded_up(_FIRST_AUTO, config) if every == "auto" else every


@dataclass
class Saver:
    """Saves, or says why it cannot.

    Attributes:
      checkpoints: of the run.
      lease: on the run's folder, in the process that writes it; None in others.
      state_bytes: of what is saved of a state.
      tell: gets a line for each try that failed.
    """

    checkpoints: Checkpoints
    lease: Lease | None
    state_bytes: int
    tell: Callable[[str], None]

    def check_room(self, config: Config) -> None:
        """Before the first step: whether all that the run will keep can be written.

        Raises:
          StorageError: it cannot.
        """
        every = config.checkpoint.every
        most = most_at_once(keep_rules(config), config.steps, None if every == "auto" else every)

        def check() -> None:
            check_writable(self.checkpoints.folder)
            there = len(self.checkpoints.steps())
            check_space(self.checkpoints.folder, self.state_bytes, max(1, most - there))

        peers.from_first(check)

    def save(self, step: int, state: TrainState, meta: dict[str, Any], *, whole: bool) -> bool:
        """Starts saving; returns as soon as `state` may be donated.

        After a failure, of this save or of one before it in the background, it is tried again some
        times, and waited for until it is whole.

        Args:
          step, state, meta: as for `Checkpoints.save`.
          whole: wait until it is, in any case.

        Returns:
          Whether the first try did it.

        Raises:
          StorageError: no try did it; the checkpoints that were there are still there.
        """
        for tried, delay_s in enumerate((*_DELAYS_S, None)):
            if self.lease is not None:
                self.lease.check()
            try:
                peers.from_first(lambda: check_space(self.checkpoints.folder, self.state_bytes, 1))
                self.checkpoints.save(step, state, meta)
                if tried or whole:
                    self.checkpoints.wait()
            except StorageError as error:
                if delay_s is None:
                    raise
                self.tell(f"warning: {error}; trying again in {delay_s:g} s")
                time.sleep(delay_s)
            else:
                return not tried
        raise AssertionError  # the last try returns or raises


class SaveEvery(Every):
    """Saves every so many steps, and at once where a save in the background has failed.

    Of several processes each knows of its own failures alone, and they meet at the next save: the
    one that failed says so at its next step.
    """

    def __init__(self, saver: Saver, steps: int, do: Callable[[int, Any], Any]):
        super().__init__(steps, do)
        self._saver = saver
        self._told: StorageError | None = None

    def due(self, step: int, last: int) -> bool:
        failure = self._saver.checkpoints.failure
        if failure is None or peers.joined() == 1:
            return failure is not None or super().due(step, last)
        if failure is not self._told:
            self._told = failure
            tell(f"warning: {failure}; all processes try again at the next save")
        return super().due(step, last)


class Interval:
    """How often to save where that is for the run to find out; told once."""

    def __init__(self, config: Config, tell: Callable[[str], None]):
        self._config, self._tell = config, tell
        self._to_measure = _MEASURED if config.checkpoint.every == "auto" else 0

    @property
    def measuring(self) -> bool:
        """Whether the next save has to be measured."""
        return self._to_measure > 0

    def measured(self, save_s: float, write_s: float, step_s: float) -> int | None:
        """The steps between saves, once they are known.

        Args:
          save_s: seconds for which a save stopped the training.
          write_s: seconds until it was on disk.
          step_s: seconds of a step; 0 where that is not known yet.

        Returns:
          The same in all processes: process 0 decides.
        """
        self._to_measure -= 1
        steps = 0
        if self._to_measure <= 0 and step_s > 0:
            failure_s = 3600 * self._config.checkpoint.mean_time_to_failure
            steps = _rounded_up(steps_between(save_s, write_s, failure_s, step_s), self._config)
        if not (steps := of_the_first(min(steps, 2**31 - 1))):
            self._to_measure = max(self._to_measure, 1)
            return None
        self._tell(
            f"saving every {steps} steps, {duration(steps * step_s)}: a save stops the training "
            f"for {save_s:.3f} s and is on disk after {write_s:.3f} s"
        )
        return steps


def _rounded_up(steps: int, config: Config) -> int:
    """To a step at which what a save needs is there: a row of the log, or an evaluation."""
    every = config.eval.every if config.checkpoint.keep_best else 1
    return math.ceil(steps / every) * every

"""When something is due between steps, and what the steps in flight cost.

Metrics are fetched when a later step is already running, so that logging does not stall training.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxdp.data import Prefetch
from jaxdp.errors import NumericsError
from jaxdp.guard import Guard
from jaxdp.runtime.stragglers import Own
from jaxdp.wording import counted

_IN_FLIGHT = 2  # steps dispatched and not known to be finished


@dataclass
class Every:
    """Something to do after every `steps` steps, and at the end; 0: only at the end.

    `steps` may be changed while a run goes on.
    """

    steps: int
    do: Callable[[int, Any], Any]

    def due(self, step: int, last: int) -> bool:
        return step == last or (self.steps > 0 and step % self.steps == 0)


class Meter:
    """Bounds the steps in flight, fetches their metrics late, and knows the time spent in steps."""

    def __init__(
        self,
        stream: Prefetch,
        guard: Guard,
        first: int,
        last: int,
        *,
        log: Every | None,
        stragglers: Every | None,
        seconds: float,
        nonfinite: int,
    ):
        """Starts the clock.

        Args:
          stream: whose waiting is part of the steps' time.
          guard: told of finished steps.
          first, last: the steps done so far, and in the end.
          log, stragglers: as in `fit`.
          seconds: spent in steps before.
          nonfinite: steps that were found not to be finite before, and forgiven.
        """
        self._log, self._stragglers, self._guard = log, stragglers, guard
        self._last = last
        self._stream = stream
        self._in_flight: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._logged = (first, seconds, stream.waited_s)
        self._device_s = 0.0  # in which the devices were given steps and waited for
        self._compared = (first, seconds, stream.waited_s, 0.0)
        self._pace = {"step_time_s": 0.0, "data_wait": 0.0}
        self._nonfinite = nonfinite
        self._seconds = seconds  # of finished stretches
        self._running_since: float | None = time.perf_counter()

    def seconds(self) -> float:
        """Seconds spent in steps so far."""
        if self._running_since is None:
            return self._seconds
        return self._seconds + time.perf_counter() - self._running_since

    def dispatched(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes a step that the devices were given; waits for the oldest if there are too many."""
        self._in_flight.append((step, metrics))
        if len(self._in_flight) > _IN_FLIGHT:
            self._finish_oldest()

    @contextmanager
    def on_devices(self) -> Iterator[None]:
        """Counts a `with` block as the devices' time, of which waiting for peers is a part."""
        started = time.perf_counter()
        yield
        self._device_s += time.perf_counter() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Finishes all steps and stops the clock, while something else is done."""
        while self._in_flight:
            self._finish_oldest()
        self._seconds, self._running_since = self.seconds(), None
        yield
        self._running_since = time.perf_counter()

    def _finish_oldest(self) -> None:
        step, metrics = self._in_flight.popleft()
        with self.on_devices():
            metrics["loss"].block_until_ready()
        if self._stragglers is not None and self._stragglers.due(step, self._last):
            self._stragglers.do(step, self._own(step))
        if self._guard.nonfinite != "stop":
            self._guard.finished(step, int(metrics["nonfinite_run"]))
        if self._log is None or not self._log.due(step, self._last):
            return
        row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        # steps that are finished by now, not only the one whose metrics are told
        finished = step + sum(m["loss"].is_ready() for _, m in self._in_flight)
        self._measure(finished, self.seconds(), self._stream.waited_s)
        self._log.do(step, row | self._pace | {"elapsed_s": self.seconds()})
        self.refuse_nonfinite(int(row["nonfinite"]), step)

    def _own(self, step: int) -> Own:
        """What a step took this process by itself since it was asked last, on average."""
        now = (step, self.seconds(), self._stream.waited_s, self._device_s)
        steps, *spent = (a - b for a, b in zip(now, self._compared, strict=True))
        self._compared = now
        seconds, waited, device_s = (s / steps for s in spent)
        return Own(seconds, waited, max(0.0, seconds - waited - device_s))

    def refuse_nonfinite(self, count: int, step: int) -> None:
        """Raises NumericsError if steps were not finite and the policy is to stop."""
        if self._guard.nonfinite == "stop" and count > self._nonfinite:
            raise NumericsError(
                "a loss, gradient or model state was not finite in "
                f"{counted(count - self._nonfinite, 'step')} up to step {step}; they changed no "
                "parameter: look for bad input, or start a new run with a lower learning "
                "rate or with optimizer.clip_norm"
            )

    def _measure(self, finished: int, seconds: float, waited: float) -> None:
        """The pace since it was measured last; unchanged where no step has finished since."""
        finished_before, seconds_before, waited_before = self._logged
        elapsed = seconds - seconds_before
        if finished > finished_before and elapsed > 0:
            self._logged = (finished, seconds, waited)
            self._pace = {
                "step_time_s": elapsed / (finished - finished_before),
                "data_wait": (waited - waited_before) / elapsed,
            }

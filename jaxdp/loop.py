"""The training loop: feeds batches, keeps a few steps in flight, reports late.

The devices are never waited for except to bound the steps in flight: metrics are fetched when a
later step is already running, so that logging does not stall training.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from jaxdp.data import Prefetch, prefetch
from jaxdp.errors import NumericsError
from jaxdp.state import TrainState
from jaxdp.step import TrainStep
from jaxdp.types import Batch

_IN_FLIGHT = 2  # steps dispatched and not known to be finished

Row = dict[str, Any]


class Batches(Protocol):
    """The data stream: a function of the step."""

    def batch(self, step: int) -> Batch:
        """The global batch of a step, NumPy arrays `[B, ...]`."""
        ...


@dataclass(frozen=True)
class Every:
    """Something to do after every `steps` steps, and at the end; 0: only at the end."""

    steps: int
    do: Callable[[int, Any], Any]

    def due(self, step: int, last: int) -> bool:
        return step == last or (self.steps > 0 and step % self.steps == 0)


@dataclass
class FitResult:
    """How a run ended.

    Attributes:
      state: the final state.
      step: its step; less than asked for if the run was stopped.
      train_s: seconds spent in steps (compilation, evaluation and saving apart).
      waited_s: the part of train_s in which the devices waited for input.
      compile_s: seconds of tracing and compiling the step.
      evaluation: what the last evaluation returned.
      compiled: the compiled step, for reading what it communicates; None where nothing was left.
    """

    state: TrainState
    step: int
    train_s: float = 0.0
    waited_s: float = 0.0
    compile_s: float = 0.0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    compiled: jax.stages.Compiled | None = None


def fit(
    step: TrainStep,
    state: TrainState,
    batches: Batches,
    steps: int,
    *,
    evaluate: Every | None = None,
    save: Every | None = None,
    log: Every | None = None,
    on_compiled: Callable[[jax.stages.Compiled, float], None] = lambda compiled, seconds: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> FitResult:
    """Trains from `state.step` to `steps`.

    Args:
      step: from `make_train_step`.
      state: from `step.init` or a checkpoint; donated.
      batches: the data stream, read in a background thread.
      steps: optimizer steps of the whole run.
      evaluate: `do(step, state)` returns a mapping of means.
      save: `do(step, state)`; returns when `state` may be donated.
      log: `do(step, row)`, row holding the step's metrics, and since the row before: step_time_s
        (mean) and data_wait (the share of that time spent waiting for input); elapsed_s in all.
      on_compiled: called once with the compiled step and the seconds that compiling took.
      should_stop: asked before every step; True saves and returns.

    Returns:
      A `FitResult`.

    Raises:
      NumericsError: a loss or gradient was not finite, found when the next row is logged.
    """
    first = int(state.step)
    result = FitResult(state, first)
    if first >= steps:
        return result
    started = time.perf_counter()
    run = step.run.lower(state, step.place(batches.batch(first))).compile()
    result.compiled, result.compile_s = run, time.perf_counter() - started
    on_compiled(run, result.compile_s)
    saved = None
    with prefetch(lambda t: step.place(batches.batch(t)), first, steps) as stream:
        meter = _Meter(log, first, steps, stream, int(state.nonfinite))
        for t, batch in stream:
            if should_stop():
                break
            result.state, metrics = run(result.state, batch)
            result.step = t + 1
            meter.dispatched(t + 1, metrics)
            if evaluate is not None and evaluate.due(t + 1, steps):
                with meter.paused():
                    result.evaluation = evaluate.do(t + 1, result.state)
            if save is not None and save.due(t + 1, steps):
                with meter.paused():
                    meter.refuse_nonfinite(int(result.state.nonfinite), t + 1)
                    save.do(t + 1, result.state)
                saved = t + 1
        result.waited_s = stream.waited_s
        with meter.paused():
            if save is not None and saved != result.step:
                save.do(result.step, result.state)
    result.train_s = meter.seconds()
    return result


class _Meter:
    """Bounds the steps in flight, fetches their metrics late, and knows the time spent in steps."""

    def __init__(self, log: Every | None, first: int, last: int, stream: Prefetch, nonfinite: int):
        """Starts the clock; `nonfinite` steps were found, and forgiven, before `first`."""
        self._log = log
        self._last = last
        self._stream = stream
        self._in_flight: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._logged = (first, 0.0, stream.waited_s)
        self._pace = {"step_time_s": 0.0, "data_wait": 0.0}
        self._nonfinite = nonfinite
        self._seconds = 0.0  # of finished stretches
        self._running_since: float | None = time.perf_counter()

    def seconds(self) -> float:
        """Seconds spent in steps so far."""
        if self._running_since is None:
            return self._seconds
        return self._seconds + time.perf_counter() - self._running_since

    def dispatched(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        self._in_flight.append((step, metrics))
        if len(self._in_flight) > _IN_FLIGHT:
            self._finish_oldest()

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
        if self._log is None or not self._log.due(step, self._last):
            metrics["loss"].block_until_ready()
            return
        row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        # steps that are finished by now, not only the one whose metrics are told
        finished = step + sum(m["loss"].is_ready() for _, m in self._in_flight)
        self._measure(finished, self.seconds(), self._stream.waited_s)
        self._log.do(step, row | self._pace | {"elapsed_s": self.seconds()})
        self.refuse_nonfinite(int(row["nonfinite"]), step)

    def refuse_nonfinite(self, count: int, step: int) -> None:
        """Raises NumericsError if steps were not finite, so that none is saved over a good one."""
        if count > self._nonfinite:
            raise NumericsError(
                f"a loss or gradient was not finite in {count - self._nonfinite} step(s) up to "
                f"step {step}; those steps changed no parameter: look for bad input, or start a "
                "new run with a lower learning rate or with optimizer.clip_norm"
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

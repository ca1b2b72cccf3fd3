"""The training loop: feeds batches, keeps a few steps in flight, reports late.

The devices are never waited for except to bound the steps in flight: metrics are fetched when a
later step is already running, so that logging does not stall training.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdp.data import Prefetch, prefetch
from jaxdp.errors import NumericsError
from jaxdp.feeding import Batches, placing
from jaxdp.guard import FaultError, Guard
from jaxdp.mesh import replicate
from jaxdp.runtime.exchange import compare_leaves, compare_programs
from jaxdp.runtime.phases import COMPILE, EVALUATION, SAVE, STEP
from jaxdp.runtime.stragglers import Own
from jaxdp.runtime.watch import Watch
from jaxdp.state import TrainState
from jaxdp.steps import CompiledStep, TrainStep
from jaxdp.wording import counted

_IN_FLIGHT = 2  # steps dispatched and not known to be finished

Row = dict[str, Any]


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
    compiled: CompiledStep | None = None


def fit(
    step: TrainStep,
    state: TrainState,
    batches: Batches,
    steps: int,
    *,
    evaluate: Every | None = None,
    save: Every | None = None,
    log: Every | None = None,
    guard: Guard | None = None,
    on_compiled: Callable[[CompiledStep, float], None] = lambda compiled, seconds: None,
    should_stop: Callable[[], bool] = lambda: False,
    stop_at: Callable[[int], bool] = lambda step: False,
    stragglers: Every | None = None,
    watch: Watch | None = None,
) -> FitResult:
    """Trains from `state.step` to `steps`.

    Args:
      step: from `make_train_step`.
      state: from `step.init` or a checkpoint; donated.
      batches: the data stream, read in a background thread.
      steps: optimizer steps of the whole run.
      evaluate: `do(step, state)` returns a mapping of means.
      save: `do(step, state)`; returns when `state` may be donated.  Stopped amid steps that are not
        finite, `step` is that before the first of them.
      log: `do(step, row)`, row holding the step's metrics, and since the row before: step_time_s
        (mean) and data_wait (the share of that time spent waiting for input); elapsed_s in all.
      guard: what is done about replicas that differ and numbers that are not finite; `Guard()` by
        default, which stops.
      on_compiled: called once with the compiled step and the seconds that compiling took.
      should_stop: asked before every step; True saves and returns.
      stop_at: the same, asked with the number of steps so far.  Of several processes all must get
        the same answers.
      stragglers: `do(step, own)`, an `Own` of this process's steps since the call before.
      watch: told of each phase and step; nobody by default.

    Returns:
      A `FitResult`.

    Raises:
      UserError: processes start from different states, their streams differ, or their programs.
      NumericsError: replicas differ, or a loss, gradient or model state was not finite (found
        when the next row is logged, at the next save or at the end), and the guard's policy does
        not help.
    """
    first = int(state.step)
    result = FitResult(state, first)
    if first >= steps:
        return result
    guard, watch = guard or Guard(), watch or Watch()
    watch.enter(COMPILE, first)
    compare_leaves(state)
    guard.compare_start(step.mesh, first, state)
    placed = placing(step, batches, first)
    started = time.perf_counter()
    lowered = step.run.lower(state, placed(first))
    compare_programs(lowered)
    run = lowered.compile()
    result.compiled, result.compile_s = run, time.perf_counter() - started
    on_compiled(run, result.compile_s)
    hooks = _Hooks(
        evaluate, save, log, guard, lambda t: should_stop() or stop_at(t), stragglers, watch
    )
    while True:
        try:
            _train(step, result, placed, steps, hooks)
            return result
        except FaultError as fault:
            like = jax.tree.map(_shape, result.state)
            result.state = like  # the arrays go before others come
            result.state = guard.go_back(fault, like)
            result.step = int(result.state.step)


class _Hooks(NamedTuple):
    """What `fit` was given to do besides training."""

    evaluate: Every | None
    save: Every | None
    log: Every | None
    guard: Guard
    should_stop: Callable[[int], bool]
    stragglers: Every | None
    watch: Watch


def _train(
    step: TrainStep, result: FitResult, placed: Callable[[int], Any], last: int, hooks: _Hooks
) -> None:
    """Trains from `result` to `last`; `fit` comes here again after going back."""

    def make(t: int) -> Any:
        hooks.watch.making_input(t + 1)
        return placed(t)

    hooks.watch.enter(STEP, result.step + 1)
    with prefetch(make, result.step, last) as stream:
        meter = _Meter(hooks, result, last, stream)
        try:
            _feed(step, result, stream, last, hooks, meter)
        finally:
            result.train_s = meter.seconds()
            result.waited_s += stream.waited_s


def _feed(
    step: TrainStep,
    result: FitResult,
    stream: Prefetch,
    last: int,
    hooks: _Hooks,
    meter: "_Meter",
) -> None:
    evaluate, save, guard, watch = hooks.evaluate, hooks.save, hooks.guard, hooks.watch
    run = result.compiled
    assert run is not None
    saved = None
    for t, batch in stream:
        if hooks.should_stop(t):
            break
        if t + 1 in guard.left_out:
            result.state = result.state._replace(step=replicate(step.mesh, np.int32(t + 1)))
        else:
            with meter.on_devices():
                result.state, metrics = run(result.state, batch)
            meter.dispatched(t + 1, metrics)
        result.step = t + 1
        if evaluate is not None and evaluate.due(t + 1, last):
            with meter.paused():
                watch.enter(EVALUATION, t + 1)
                result.evaluation = evaluate.do(t + 1, result.state)
        if save is not None and save.due(t + 1, last):
            if _worth_saving(result, last):
                _save(step.mesh, result, save, hooks, meter)
                saved = t + 1
            else:
                meter.refuse_nonfinite(int(result.state.nonfinite), t + 1)
        elif guard.due(t + 1):
            with meter.paused():
                guard.compare(step.mesh, t + 1, result.state)
        if t + 1 < last:
            watch.enter(STEP, t + 2)  # which begins by waiting for its input
    if save is not None and saved != result.step:
        _save(step.mesh, result, save, hooks, meter, amid_failing=result.step < last)
    with meter.paused():
        meter.refuse_nonfinite(int(result.state.nonfinite), result.step)


def _worth_saving(result: FitResult, last: int) -> bool:
    """Not amid steps that fail: a guard may want to go back to before the first of them."""
    return result.step == last or not int(result.state.nonfinite_run)


def _save(
    mesh: Mesh,
    result: FitResult,
    save: Every,
    hooks: _Hooks,
    meter: "_Meter",
    *,
    amid_failing: bool = False,
) -> None:
    """Saves a state that was found good; `amid_failing` steps, the one before the first of them."""
    guard = hooks.guard
    with meter.paused():
        hooks.watch.enter(SAVE, result.step)
        meter.refuse_nonfinite(int(result.state.nonfinite), result.step)
        if guard.every:
            guard.compare(mesh, result.step, result.state)
        state = result.state
        if amid_failing:
            state = _before_failing(mesh, state, guard.left_out)
        save.do(int(state.step), state)


def _before_failing(mesh: Mesh, state: TrainState, left_out: Collection[int]) -> TrainState:
    """The state before the steps that failed in a row up to this one.

    They changed nothing but the counters.  A checkpoint of this one could not be gone back to, and
    may push out the last one that could; from before them, they are done and judged again.
    """
    step, failed = int(state.step), 0
    while failed < int(state.nonfinite_run) and step - failed not in left_out:
        failed += 1
    names = ("step", "nonfinite", "nonfinite_run") if failed else ()
    counters = {name: np.int32(int(getattr(state, name)) - failed) for name in names}
    return state._replace(**replicate(mesh, counters))


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


class _Meter:
    """Bounds the steps in flight, fetches their metrics late, and knows the time spent in steps."""

    def __init__(self, hooks: _Hooks, result: FitResult, last: int, stream: Prefetch):
        """Starts the clock; non-finite steps up to here were found before, and forgiven."""
        self._log, self._stragglers = hooks.log, hooks.stragglers
        self._guard = hooks.guard
        self._last = last
        self._stream = stream
        self._in_flight: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._logged = (result.step, result.train_s, stream.waited_s)
        self._device_s = 0.0  # in which the devices were given steps and waited for
        self._compared = (result.step, result.train_s, stream.waited_s, 0.0)
        self._pace = {"step_time_s": 0.0, "data_wait": 0.0}
        self._nonfinite = int(result.state.nonfinite)
        self._seconds = result.train_s  # of finished stretches
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

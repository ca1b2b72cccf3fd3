"""The training loop: feeds batches, keeps a few steps in flight, reports late.

The devices are never waited for except to bound the steps in flight: metrics are fetched when a
later step is already running, so that logging does not stall training.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdp.data import Prefetch, prefetch
from jaxdp.feeding import Batches, placing
from jaxdp.guard import FaultError, Guard
from jaxdp.mesh import replicate
from jaxdp.meter import Every, Meter
from jaxdp.runtime.exchange import compare_leaves, compare_programs
from jaxdp.runtime.phases import COMPILE, EVALUATION, SAVE, STEP
from jaxdp.runtime.watch import Watch
from jaxdp.state import TrainState
from jaxdp.steps import CompiledStep, TrainStep


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
        meter = Meter(
            stream,
            hooks.guard,
            result.step,
            last,
            log=hooks.log,
            stragglers=hooks.stragglers,
            seconds=result.train_s,
            nonfinite=int(result.state.nonfinite),
        )
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
    meter: Meter,
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
            try:
                _evaluate(result, evaluate, hooks, meter)
            except Exception:
                # trained to the end, and then lost?  Several processes may not all have failed
                if save is not None and t + 1 == last and jax.process_count() == 1:
                    _save(step.mesh, result, save, hooks, meter)
                raise
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


def _evaluate(result: FitResult, evaluate: Every, hooks: _Hooks, meter: Meter) -> None:
    with meter.paused():
        hooks.watch.enter(EVALUATION, result.step)
        result.evaluation = evaluate.do(result.step, result.state)


def _worth_saving(result: FitResult, last: int) -> bool:
    """Not amid steps that fail: a guard may want to go back to before the first of them."""
    return result.step == last or not int(result.state.nonfinite_run)


def _save(
    mesh: Mesh,
    result: FitResult,
    save: Every,
    hooks: _Hooks,
    meter: Meter,
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

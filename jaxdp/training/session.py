"""What happens around the steps of a run: its log, its checkpoints, its folder."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdp import hlo, peers
from jaxdp.assemble import Job
from jaxdp.checkpoints import Checkpoints
from jaxdp.collectives.tuning import Choice
from jaxdp.config import Config, to_yaml
from jaxdp.errors import StorageError
from jaxdp.guard import Guard
from jaxdp.loop import FitResult, fit
from jaxdp.meter import Every
from jaxdp.plan import compare
from jaxdp.report.progress import Reporter
from jaxdp.report.record import Stopwatch, close_stretch_before, run_facts
from jaxdp.report.runfolder import environment, write_atomically, write_json
from jaxdp.report.runlog import RunLog
from jaxdp.runtime.phases import EVALUATION, SAVE, START
from jaxdp.runtime.stragglers import Stragglers
from jaxdp.runtime.watch import Watch
from jaxdp.state import TrainState
from jaxdp.steps import CompiledStep
from jaxdp.training.resuming import Meta
from jaxdp.training.saving import Interval, SaveEvery, Saver, first_interval


@dataclass
class Session:
    """A run with its parts; its methods are what `fit` calls between steps.

    Attributes:
      config, job, choice: what is trained, and with which algorithm.
      out: the run folder.
      checkpoints, guard, reporter, clock: open for as long as the run lasts.
      meta: what checkpoints hold besides the state; changed by `resume`.
      saver: of `checkpoints`.
      watch: told where the run is.
      log: of the stretch from `fit` on.
    """

    config: Config
    job: Job
    choice: Choice
    out: Path
    checkpoints: Checkpoints
    guard: Guard
    reporter: Reporter
    clock: Stopwatch
    meta: Meta
    saver: Saver
    watch: Watch
    log: RunLog = field(init=False)
    _saving: SaveEvery = field(init=False)
    _interval: Interval = field(init=False)
    _evaluated: tuple[int, dict[str, float]] = (0, {})  # the newest evaluation, and its step
    _ending: bool = False

    def resume(self, like: TrainState) -> TrainState:
        """The state of the newest checkpoint.

        Raises:
          UserError: the data are not the same.
          StorageError: there is none that can be read.
        """
        state, saved, lines = self.checkpoints.restore(like)
        self.meta = self.meta.resumed(saved)
        self.guard.resume(saved.get("guard", {}))
        self._warn(lines)
        return state

    def fit(
        self,
        state: TrainState,
        should_stop: Callable[[], bool],
        stop_at: Callable[[int], bool],
    ) -> FitResult:
        """Trains from `state` to the last step."""
        config, job, first = self.config, self.job, int(state.step)

        self.log = self._open_log(first)
        self._saving = SaveEvery(self.saver, first_interval(config), self._save)
        self._interval = Interval(config, self.reporter.line)
        try:
            self.clock.since_start("start")
            self.guard.restore = self._restore
            if first >= config.steps:  # killed after the last save, before the summary
                self.watch.enter(EVALUATION, first)
                means = job.evaluate(state, on_batch=self.watch.beat)
                return FitResult(state, first, evaluation=means)
            result = fit(
                job.step,
                state,
                job.loader,
                config.steps,
                evaluate=Every(config.eval.every, self._evaluate),
                save=self._saving,
                log=Every(config.log.every, self._log),
                guard=self.guard,
                on_compiled=lambda compiled, seconds: self._begin(state, compiled, seconds),
                should_stop=lambda: self._note(should_stop()),
                stop_at=lambda step: self._note(stop_at(step)),
                stragglers=Every(config.log.every, Stragglers(self.reporter.line).compare),
                watch=self.watch,
            )
            self._complete_save(result)
            return result
        finally:
            self.log.close()
            self.reporter.close()

    def _open_log(self, first: int) -> RunLog:
        dataset, config = self.job.dataset, self.config
        language = dataset.task == "language"
        return RunLog(
            self.out if peers.is_first() else None,
            self.reporter,
            steps=config.steps,
            devices=self.job.mesh.size,
            items_per_step=config.global_batch * (dataset.shape[0] if language else 1),
            unit="tokens" if language else "examples",
            resumed_step=first,
            tensorboard=config.log.tensorboard,
        )

    def _note(self, ending: bool) -> bool:
        self._ending = self._ending or ending
        return ending

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        with self.clock.on("evaluation"):
            means = self.job.evaluate(state, on_batch=self.watch.beat)
        self.log.evaluation(step, means)
        self._evaluated = (step, means)
        return means

    def _log(self, step: int, row: dict[str, Any]) -> None:
        if self.saver.lease is not None:
            self.saver.lease.check()  # another's rows would be among ours
        self.log.metrics(step, row)

    def _save(self, step: int, state: TrainState) -> None:
        self.log.flush()  # a run that is killed later resumes here, with the rows up to here
        seconds = self.meta.train_seconds + self.log.elapsed_s
        self.clock.seconds["steps"] = self.log.elapsed_s
        meta = self.meta.at(step, seconds) | {"guard": self.guard.record()}
        at, means = self._evaluated
        if at == step:  # what JSON lacks is never best
            meta["evaluation"] = {
                name: x if math.isfinite(x) else None for name, x in means.items()
            }
        whole = self._ending or step == self.config.steps
        with self.clock.on("saving"):
            started = time.perf_counter()
            undisturbed = self.saver.save(step, state, meta, whole=whole)
            saved = time.perf_counter()
            if self._interval.measuring and undisturbed and not whole:
                try:
                    self.checkpoints.wait()
                except StorageError as error:
                    self._warn([f"{error}; trying again"])
                    self.saver.save(step, state, meta, whole=True)
                    return
                written = time.perf_counter()
                steps = self._interval.measured(saved - started, written - started, self.log.step_s)
                self._saving.steps = steps or self._saving.steps

    def _complete_save(self, result: FitResult) -> None:
        """Stopped right after a save, a run has it still being written, and may have to redo it."""
        if result.step == self.config.steps:  # waited for
            return
        self.watch.enter(SAVE, result.step)
        try:
            self.checkpoints.wait()
        except StorageError as error:
            self._warn([f"{error}; trying again"])
            self._save(result.step, result.state)

    def _restore(self, at_most: int | None, like: TrainState) -> TrainState | None:
        self.watch.enter(START, at_most or 0)
        try:
            self.checkpoints.wait()
        except StorageError as error:  # those before it are there
            self._warn([str(error)])
        steps = peers.from_first(self.checkpoints.steps)
        if not any(at_most is None or step <= at_most for step in steps):
            return None
        state, _, lines = self.checkpoints.restore(like, at_most)
        self._warn(lines)
        self.log.back_to(int(state.step))
        return state

    def _warn(self, lines: list[str]) -> None:
        for line in lines:
            self.reporter.line(f"warning: {line}")

    def _begin(self, state: TrainState, compiled: CompiledStep, seconds: float) -> None:
        """Writes the run's files.  Before, a mistake of the user could still come to light."""
        if not peers.is_first():
            return
        config = self.config.model_copy(update={"out": str(self.out), "resume": False})
        write_atomically(self.out / "config.yaml", to_yaml(config))
        self.clock.seconds["compiling"] = seconds
        found = hlo.collectives(compiled.as_text() or "")
        facts = run_facts(
            self.out, int(state.step), state.params, self.choice, self.job.dataset, found
        )
        seen = environment(list(self.job.mesh.devices.flat))
        write_json(self.out / "environment.json", seen | {"run": facts})
        close_stretch_before(self.out, self.reporter)
        self.reporter.line(f"compiled in {seconds:.1f} s: a step runs {hlo.describe(found)}")
        (lowered_for, _) = compiled.args_info
        if (plan := self.job.step.plan(*lowered_for)) is not None:
            self.reporter.line(f"sync   {compare(plan, found)}")

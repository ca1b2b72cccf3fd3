"""A whole run from its configuration: what `python -m jaxdp.train` does, as a function."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

import jaxdp
from jaxdp import hlo
from jaxdp.assemble import Job, assemble, check_names, load_data
from jaxdp.checkpoints import Checkpoints
from jaxdp.choosing import choose_algorithm
from jaxdp.collectives.tuning import Choice
from jaxdp.config import Config, check_devices, describe_batch, diff, load_config, to_yaml
from jaxdp.data import Dataset
from jaxdp.errors import NumericsError, StorageError, UserError
from jaxdp.guard import Guard
from jaxdp.loop import Every, FitResult, fit
from jaxdp.mesh import use_devices
from jaxdp.optim import describe_decay
from jaxdp.plan import compare
from jaxdp.report.progress import Reporter, SilentReporter, duration
from jaxdp.report.record import Stopwatch, run_facts, write_failure, write_report
from jaxdp.report.runfolder import (
    check_run_folder,
    create_run_folder,
    environment,
    read_json,
    write_atomically,
    write_json,
)
from jaxdp.report.runlog import RunLog, check_tensorboard
from jaxdp.state import TrainState
from jaxdp.trees import bytes_per_device, count_bytes, count_elements, digest
from jaxdp.types import Device

# keys that may differ when a run is resumed: they do not change what was learned so far
_MAY_CHANGE = (
    "steps", "devices", "out", "resume", "sync.", "checkpoint.", "eval.", "log.", "guard.",
)  # fmt: skip
# of these sections, what does change it
_AND_YET_STAY = ("sync.local_steps", "sync.outer_")


def run_training(
    config: Config,
    reporter: Reporter | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Trains as `config` says, in the run folder `config.out`.

    Args:
      config: from `jaxdp.config.load_config`.
      reporter: where progress is told; nowhere by default.
      should_stop: asked before every step; True saves and returns.

    Returns:
      What summary.json holds; `stopped` is True if the run is not complete.

    Raises:
      UserError: the configuration, the data or the run folder do not fit.
      NumericsError, StorageError: the run ended early.
    """
    reporter, clock = reporter or SilentReporter(), Stopwatch()
    out = Path(config.out or "runs/default")
    resuming = check_run_folder(out, config.resume)
    if resuming:
        _check_unchanged(config, out, reporter)
    if config.log.tensorboard:
        check_tensorboard()
    dataset = load_data(config)
    check_names(config, dataset)
    devices = use_devices(config.devices)
    if mistakes := check_devices(config, len(devices)):
        raise UserError(*mistakes)
    choice = choose_algorithm(config, dataset, devices)
    job = assemble(config, dataset, devices, choice.algorithm)
    state = job.init()
    create_run_folder(out)
    # the final save is complete when the context is left, before anything calls the run done
    meta = _Meta(dict(dataset.facts))
    with Checkpoints(out / "checkpoints", config.checkpoint.keep, job.step.form) as checkpoints:
        guard = Guard(**config.guard.model_dump(), tell=reporter.line)
        if resuming:
            state, saved, lines = checkpoints.restore(state)
            meta = meta.resumed(saved)
            guard.resume(saved.get("guard", {}))
            for line in lines:
                reporter.line(f"warning: {line}")
        if (summary := _complete(out, int(state.step), config.steps)) is not None:
            reporter.line(f"nothing to do: the run in {out} is complete")
            return summary
        for line in _introduction(config, job, state, devices, choice):
            reporter.line(line)
        try:
            result = _fit(
                config, job, choice, state, meta, checkpoints, guard, out, reporter, clock,
                should_stop,
            )  # fmt: skip
            with clock.on("saving"):
                checkpoints.wait()
        except (NumericsError, StorageError) as error:
            write_failure(out, error, clock, reporter)
            raise
    summary = _summary(choice, job, result, config.steps, meta, clock) | guard.record()
    write_json(out / "summary.json", summary)
    write_report(out, reporter)
    return summary


def _complete(out: Path, step: int, steps: int) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do; None if there is something."""
    summary = read_json(out / "summary.json")  # where it is damaged, it is written anew
    done = summary and step >= steps and summary["steps"] == step and not summary["stopped"]
    return summary if done else None


@dataclass(frozen=True)
class _Meta:
    """What a checkpoint holds besides the state: facts of the data, seconds spent in steps."""

    data: dict[str, Any]
    train_seconds: float = 0.0

    def resumed(self, saved: dict[str, Any]) -> "_Meta":
        """This run's, going on from what was saved; the data must be the same."""
        for name in ("sha256", "digest"):
            old, new = saved.get("data", {}).get(name), self.data.get(name)
            if old != new:
                raise UserError(
                    f"data: {name} is {new} now and was {old} when the run was saved; a resumed "
                    "run needs the same data: put it back, or start a new run with --out"
                )
        return replace(self, train_seconds=saved.get("train_seconds", 0.0))


def _fit(
    config: Config,
    job: Job,
    choice: Choice,
    state: TrainState,
    meta: _Meta,
    checkpoints: Checkpoints,
    guard: Guard,
    out: Path,
    reporter: Reporter,
    clock: Stopwatch,
    should_stop: Callable[[], bool],
) -> FitResult:
    tokens = job.dataset.shape[0] if job.dataset.task == "language" else 1
    log = RunLog(
        out,
        reporter,
        steps=config.steps,
        devices=job.mesh.size,
        items_per_step=config.global_batch * tokens,
        unit="tokens" if job.dataset.task == "language" else "examples",
        resumed_step=int(state.step),
        tensorboard=config.log.tensorboard,
    )

    def evaluate(step: int, state: TrainState) -> dict[str, float]:
        with clock.on("evaluation"):
            means = job.evaluate(state)
        log.evaluation(step, means)
        return means

    def save(step: int, state: TrainState) -> None:
        log.flush()  # a run that is killed later resumes here, with the rows up to here
        seconds = meta.train_seconds + log.elapsed_s
        clock.seconds["steps"] = log.elapsed_s
        with clock.on("saving"):
            saved = asdict(replace(meta, train_seconds=seconds)) | {"guard": guard.record()}
            checkpoints.save(step, state, saved)

    def restore(at_most: int | None, like: TrainState) -> TrainState | None:
        checkpoints.wait()
        if not any(at_most is None or step <= at_most for step in checkpoints.steps()):
            return None
        state, _, lines = checkpoints.restore(like, at_most)
        for line in lines:
            reporter.line(f"warning: {line}")
        log.back_to(int(state.step))
        return state

    def on_compiled(compiled: jax.stages.Compiled, seconds: float) -> None:
        # the folder holds a run from here on: no mistake of the user can come to light later
        write_atomically(
            out / "config.yaml",
            to_yaml(config.model_copy(update={"out": str(out), "resume": False})),
        )
        clock.seconds["compiling"] = seconds
        found = hlo.collectives(compiled.as_text() or "")
        facts = run_facts(out, int(state.step), state.params, choice, job.dataset, found)
        seen = environment(list(job.mesh.devices.flat))
        write_json(out / "environment.json", seen | {"run": facts})
        reporter.line(f"compiled in {seconds:.1f} s: a step runs {hlo.describe(found)}")
        (lowered_for, _) = compiled.args_info
        if (plan := job.step.plan(*lowered_for)) is not None:
            reporter.line(f"sync   {compare(plan, found)}")

    try:
        clock.since_start("start")
        guard.restore = restore
        if int(state.step) >= config.steps:  # killed after the last save, before the summary
            return FitResult(state, int(state.step), evaluation=job.evaluate(state))
        return fit(
            job.step,
            state,
            job.loader,
            config.steps,
            evaluate=Every(config.eval.every, evaluate),
            save=Every(config.checkpoint.every, save),
            log=Every(config.log.every, log.metrics),
            guard=guard,
            on_compiled=on_compiled,
            should_stop=should_stop,
        )
    finally:
        log.close()
        reporter.close()


def _check_unchanged(config: Config, out: Path, reporter: Reporter) -> None:
    """A run goes on with what it began with; what may change is told."""
    before = load_config(str(out / "config.yaml"))
    changed = diff(before, config)
    refused = {
        key: values
        for key, values in changed.items()
        if not key.startswith(_MAY_CHANGE) or key.startswith(_AND_YET_STAY)
    }
    if refused:
        raise UserError(
            *(
                f"{key}: {new} now and {old} in {out / 'config.yaml'}; a resumed run keeps it: "
                "start a new run with --out"
                for key, (old, new) in refused.items()
            )
        )
    told = {k: v for k, v in changed.items() if k not in ("out", "resume")}
    for key, (old, new) in told.items():
        reporter.line(f"resuming with {key} {new} instead of {old}")


def _introduction(
    config: Config, job: Job, state: TrainState, devices: list[Device], choice: Choice
) -> list[str]:
    n = len(devices)
    kind = devices[0].device_kind if devices[0].platform != "cpu" else "CPU"
    emulated = n > 1 and kind == "CPU"
    where = f"{n} emulated {kind} devices in one process: shared memory, not a network"
    dataset: Dataset = job.dataset
    what = "gradients" if config.sync.local_steps is None else "changes made by local steps"
    lines = [
        f"jaxdp {jaxdp.__version__}, jax {jax.__version__}, "
        + (where if emulated else f"{n} {kind} device{'s' * (n > 1)}"),
        f"data   {dataset.name}: {len(dataset.train):,} examples, "
        f"{len(dataset.heldout):,} held out",
        f"model  {config.model.kind}: {count_elements(state.params):,} parameters, "
        f"{hlo.format_bytes(count_bytes(state.params))}, compute in {config.compute_dtype}",
        f"batch  {describe_batch(config, n)}",
        f"sync   {choice.algorithm}: {hlo.format_bytes(count_bytes(state.params))} of {what}, "
        f"{config.sync.wire} on the wire; {choice.reason}",
    ]
    if config.sync.shard_optimizer:
        held = hlo.format_bytes(bytes_per_device(state.opt_state))
        lines.append(f"zero   the optimizer's state is shared out: {held} on each device")
    if config.optimizer.freeze:
        lines.append(f"frozen {', '.join(config.optimizer.freeze)}")
    if getattr(config.optimizer, "weight_decay", 0):
        lines += describe_decay(state.params)
    if int(state.step):
        lines.append(f"resumed at step {int(state.step)} of {config.steps}")
    return lines


def _summary(
    choice: Choice, job: Job, result: FitResult, steps: int, meta: _Meta, clock: Stopwatch
) -> dict[str, Any]:
    state = result.state
    params = jax.device_get(state.params)
    return {
        "steps": result.step,
        "stopped": result.step < steps,
        "devices": job.mesh.size,
        "algorithm": choice.algorithm,
        "parameters": count_elements(params),
        "train_seconds": round(meta.train_seconds + result.train_s, 3),
        "compile_seconds": round(result.compile_s, 3),
        "seconds": clock.rounded(steps=result.train_s - result.waited_s, input=result.waited_s),
        "skipped": int(state.skipped),
        "nonfinite": int(state.nonfinite),
        **({"overflows": int(state.loss_scale.overflows)} if state.loss_scale else {}),
        "eval": dict(result.evaluation),
        "params_digest": digest(params),
        "data": meta.data,
    }


def describe_summary(summary: dict[str, Any], out: Path | str) -> str:
    """The result of a run in one line."""
    values = ", ".join(
        f"{name} {'not finite' if value is None else f'{value:.4f}'}"
        for name, value in summary["eval"].items()
        if name != "weight"
    )
    what = "stopped" if summary["stopped"] else "done"
    report = ", report.html" if (Path(out) / "report.html").is_file() else ""
    return (
        f"{what} at step {summary['steps']}: {values + '; ' if values else ''}"
        f"trained {duration(summary['train_seconds'])} on {summary['devices']} device(s), "
        f"{summary['algorithm']}; {out}/summary.json{report}"
    )

"""A run from its configuration to its summary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdp import peers
from jaxdp.assemble import Job, assemble, check_names, load_data
from jaxdp.checkpoints import Checkpoints
from jaxdp.choosing import choose_algorithm
from jaxdp.collectives.tuning import Choice
from jaxdp.config import Config, check_devices
from jaxdp.errors import NumericsError, StorageError, UserError
from jaxdp.guard import Guard
from jaxdp.mesh import use_devices
from jaxdp.report.board import check_tensorboard
from jaxdp.report.progress import Reporter, SilentReporter
from jaxdp.report.record import Stopwatch, complete_report, write_failure, write_report
from jaxdp.report.runfolder import check_run_folder, write_json
from jaxdp.runtime.phases import END
from jaxdp.runtime.watch import Watch
from jaxdp.training.holding import check_not_held, held_folder
from jaxdp.training.introduction import introduction
from jaxdp.training.resuming import (
    Meta,
    check_same_data,
    check_unchanged,
    kept_settings,
    told_form,
)
from jaxdp.training.saving import Saver, keep_rules
from jaxdp.training.session import Session
from jaxdp.training.summary import complete, summarize
from jaxdp.trees import count_bytes


def run_training(
    config: Config,
    reporter: Reporter | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    stop_at: Callable[[int], bool] = lambda step: False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Trains as `config` says, in the run folder `config.out`.

    In a job of several processes all call it alike; process 0 writes and reports for all.

    Args:
      config: from `jaxdp.config.load_config`.
      reporter: where progress is told; nowhere by default.
      should_stop: asked before every step; True saves and returns.
      stop_at: the same, asked with the number of steps so far.  Of several processes all must get
        the same answers.
      watch: told of each phase and step from the compilation on; nobody by default.

    Returns:
      What summary.json holds; `stopped` is True if the run is not complete.

    Raises:
      UserError: the configuration, the data or the run folder do not fit.
      NumericsError, StorageError: the run ended early.
    """
    reporter, clock, watch = reporter or SilentReporter(), Stopwatch(), watch or Watch()
    if not peers.is_first():
        reporter = SilentReporter()
    out = Path(config.out or "runs/default")
    resuming, changes = peers.from_first(lambda: _going_on(config, out))
    if config.log.tensorboard:
        check_tensorboard()
    job, choice = _prepare(config, resuming)
    state = job.init()
    guard = Guard(**config.guard.model_dump(), tell=reporter.line)
    meta = Meta(dict(job.dataset.facts), kept_settings(config))
    form = told_form(config, job.step.form, reporter)
    with (
        held_folder(out, config.resume, resuming, reporter.line) as lease,
        Checkpoints(
            out / "checkpoints", keep_rules(config), form, config.checkpoint.verify
        ) as checkpoints,
    ):
        saver = Saver(checkpoints, lease, count_bytes(form.like(state)), reporter.line)
        parts = (config, job, choice, out, checkpoints, guard, reporter, clock, meta, saver)
        session = Session(*parts, watch)
        if resuming:
            state = session.resume(state)
        step = int(state.step)
        summary = peers.from_first(lambda: complete(out, step, config.steps))
        if summary is not None:
            reporter.line(f"nothing to do: the run in {out} is complete")
            if lease is not None:
                complete_report(out, reporter)
            return summary
        saver.check_room(config)
        for line in [*changes, *introduction(config, job, state, choice)]:
            reporter.line(line)
        try:
            result = session.fit(state, should_stop, stop_at)  # its last save is complete
        except (NumericsError, StorageError) as error:
            if lease is not None and not lease.lost:  # else the folder is another's to write
                write_failure(out, error, clock, reporter, guard.record())
            raise
        watch.enter(END, result.step)
        summary = summarize(choice, job, result, config.steps, session.meta, guard, clock)
        if lease is not None:
            write_json(out / "summary.json", summary)
            write_report(out, reporter)
    return summary


def _going_on(config: Config, out: Path) -> tuple[bool, list[str]]:
    """Whether a run goes on, and a line for each key that has changed since it began."""
    check_not_held(out)
    resuming = check_run_folder(out, config.resume)
    return resuming, check_unchanged(config, out) if resuming else []


def _prepare(config: Config, resuming: bool) -> tuple[Job, Choice]:
    """The parts of a run, and the algorithm that it uses; writes nothing."""
    if resuming:  # what it began with is not asked for again
        config = config.model_copy(update={"init_from": None})
    dataset = load_data(config)
    check_same_data(dataset.facts)
    check_names(config, dataset)
    devices = use_devices(config.devices)
    if mistakes := check_devices(config, len(devices)):
        raise UserError(*mistakes)
    choice = choose_algorithm(config, dataset, devices)
    return assemble(config, dataset, devices, choice.algorithm), choice

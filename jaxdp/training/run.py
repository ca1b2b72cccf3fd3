"""A run from its configuration to its summary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from jaxdp.report.record import Stopwatch, write_failure, write_report
from jaxdp.report.runfolder import check_run_folder, write_json
from jaxdp.training.holding import check_not_held, held_folder
from jaxdp.training.introduction import introduction
from jaxdp.training.resuming import Meta, check_unchanged, kept_settings, told_form
from jaxdp.training.saving import Saver, keep_rules
from jaxdp.training.session import Session
from jaxdp.training.summary import complete, summarize
from jaxdp.trees import count_bytes


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
    check_not_held(out)
    resuming = check_run_folder(out, config.resume)
    changes = check_unchanged(config, out) if resuming else []
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
        session = Session(*parts)
        if resuming:
            state = session.resume(state)
        if (summary := complete(out, int(state.step), config.steps)) is not None:
            reporter.line(f"nothing to do: the run in {out} is complete")
            return summary
        saver.check_room(config)
        for line in [*changes, *introduction(config, job, state, choice)]:
            reporter.line(line)
        try:
            result = session.fit(state, should_stop)  # its last save is complete
        except (NumericsError, StorageError) as error:
            if lease is None or not lease.lost:  # else the folder is another run's
                write_failure(out, error, clock, reporter, guard.record())
            raise
        summary = summarize(choice, job, result, config.steps, session.meta, guard, clock)
        write_json(out / "summary.json", summary)
        write_report(out, reporter)
    return summary


def _prepare(config: Config, resuming: bool) -> tuple[Job, Choice]:
    """The parts of a run, and the algorithm that it uses; writes nothing."""
    if resuming:  # what it began with is not asked for again
        config = config.model_copy(update={"init_from": None})
    dataset = load_data(config)
    check_names(config, dataset)
    devices = use_devices(config.devices)
    if mistakes := check_devices(config, len(devices)):
        raise UserError(*mistakes)
    choice = choose_algorithm(config, dataset, devices)
    return assemble(config, dataset, devices, choice.algorithm), choice

"""Tells a run's metrics: to the person in front of it, to metrics.jsonl, to TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdp.errors import StorageError
from jaxdp.report.board import Board
from jaxdp.report.progress import Reporter, describe
from jaxdp.report.runfolder import MetricsLog


class RunLog:
    """Takes the loop's rows and an evaluation's means; one line of metrics.jsonl per step."""

    def __init__(
        self,
        out: Path | None,
        reporter: Reporter,
        *,
        steps: int,
        devices: int,
        items_per_step: int,
        unit: str,
        resumed_step: int = 0,
        tensorboard: bool = False,
    ):
        """Opens the logs of a run.

        Args:
          out: the run folder; None: another process writes.
          reporter: where people read.
          steps: of the whole run, for the time that is left.
          devices: for the throughput of one.
          items_per_step, unit: what a step processes: 96 "examples", 6144 "tokens".
          resumed_step: rows after it are from a run that did not get on; they are dropped.
          tensorboard: whether to write TensorBoard files too; see `board.check_tensorboard`.
        """
        self._metrics = MetricsLog(out / "metrics.jsonl", resumed_step) if out else None
        self._reporter = reporter
        self._steps, self._devices = steps, devices
        self._items, self._unit = items_per_step, unit
        self._row: dict[str, Any] = {}
        self.elapsed_s = 0.0  # in steps, up to the newest row
        self.step_s = 0.0  # of a step, by the newest row
        self._board = Board(out, resumed_step) if out and tensorboard else None

    def metrics(self, step: int, row: Mapping[str, Any]) -> None:
        """A row of the loop's."""
        self.flush()
        self.elapsed_s, self.step_s = row["elapsed_s"], row["step_time_s"]
        rate = self._items / row["step_time_s"] if row["step_time_s"] else 0.0
        self._row = {
            "step": step,
            **row,
            "per_second": rate,
            "per_second_per_device": rate / self._devices,
            "unit": self._unit,
        }
        eta_s = (self._steps - step) * row["step_time_s"]
        self._reporter.status(self._row | {"eta_s": eta_s})

    def evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Means over the held-out examples; they join the row of the same step."""
        if self._row.get("step") != step:
            self.flush()
            self._row = {"step": step}
        self._row["eval"] = dict(means)
        count = means["weight"]
        self._reporter.line(f"step {step}  held out ({count:,.0f}): {describe(means)}")

    def back_to(self, step: int) -> None:
        """Forgets the rows after `step`: the run went back to there and will log them again."""
        self.flush()
        if self._metrics is not None:
            try:
                self._metrics.drop_after(step)
            except StorageError as error:
                self._reporter.line(f"warning: {error}; training goes on")
        if self._board is not None:
            self._board.back_to(step)

    def flush(self) -> None:
        """Writes the row that was kept back for an evaluation to join."""
        if not self._row:
            return
        if self._metrics is not None and (warning := self._metrics.write(self._row)):
            self._reporter.line(f"warning: {warning}")
        if self._board is not None and (warning := self._board.write(self._row)):
            self._reporter.line(f"warning: {warning}")
            self._board = None
        self._row = {}

    def close(self) -> None:
        """Writes what is left."""
        self.flush()
        if self._board is not None:
            self._board.close()

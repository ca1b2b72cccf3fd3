"""What the files of a run folder hold, for its report."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdp.config import Config, load_config
from jaxdp.errors import UserError
from jaxdp.report.runfolder import read_json, read_metrics, read_summary


@dataclass(frozen=True)
class RecordedRun:
    """A run as its files tell it.

    Attributes:
      folder: of the run.
      config: None where it is missing or cannot be read.
      rows, damaged: of metrics.jsonl, and how many of its lines were left out.
      summary, environment: empty where they are missing or damaged.
      facts: the part of the environment that is about the run.
      unread: names of files that are there and could not be read.
    """

    folder: Path
    config: Config | None
    rows: list[dict[str, Any]]
    damaged: int
    summary: dict[str, Any]
    environment: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def devices(self) -> int:
        return self.environment.get("devices", 0)


def read_run(folder: Path) -> RecordedRun:
    """Reads a run folder.

    Raises:
      UserError: there is no such folder, or it holds no run.
    """
    if not (folder / "config.yaml").exists() and not (folder / "metrics.jsonl").exists():
        raise UserError(
            f"{folder}: holds neither config.yaml nor metrics.jsonl; expected the folder of a run"
        )
    try:
        config = load_config(str(folder / "config.yaml"))
    except UserError:
        config = None
    rows, damaged = read_metrics(folder / "metrics.jsonl")
    found = {
        "summary.json": read_summary(folder),
        "environment.json": read_json(folder / "environment.json"),
    }
    summary, environment = found.values()
    unread = tuple(name for name in found if not found[name] and (folder / name).exists())
    run = environment.get("run", {})
    return RecordedRun(folder, config, rows, damaged, summary, environment, run, unread)

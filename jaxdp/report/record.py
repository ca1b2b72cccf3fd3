"""What a run notes down besides its metrics, so that its report is made from its files alone."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jaxdp
from jaxdp import hlo
from jaxdp.collectives.tuning import Choice
from jaxdp.data import Dataset
from jaxdp.errors import JaxdpError, StorageError
from jaxdp.report.progress import Reporter
from jaxdp.report.run_page import run_page
from jaxdp.report.runfolder import (
    read_json,
    read_metrics,
    read_summary,
    write_atomically,
    write_json,
)
from jaxdp.trees import count_bytes, count_elements
from jaxdp.types import PyTree

_COUNTS = ("skipped", "nonfinite", "overflows")  # columns that a failed run's summary tells too


class Stopwatch:
    """Seconds by what they were spent on, since it was made."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._made = time.perf_counter()

    def since_start(self, name: str) -> None:
        """Puts all seconds so far under a name."""
        self.seconds[name] = time.perf_counter() - self._made

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Adds the seconds of a `with` block to a name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def rounded(self, **more: float) -> dict[str, float]:
        """What was measured, and what others measured, for a file."""
        return {name: round(s, 3) for name, s in (self.seconds | more).items()}


def run_facts(
    out: Path,
    step: int,
    params: PyTree,
    choice: Choice,
    dataset: Dataset,
    found: list[hlo.Collective],
) -> dict[str, Any]:
    """What the report tells of a run and its configuration does not.

    Args:
      out: the run folder, with the environment.json of the run before if this one resumes it.
      step: where the run begins.
      params: of the model.
      choice: the algorithm, and why.
      dataset: what is trained on.
      found: the collectives of the compiled step.
    """
    before = read_json(out / "environment.json").get("run", {})
    resumed_at = [at for at in before.get("resumed_at", []) if at < step]
    return {
        "jaxdp": jaxdp.__version__,
        "algorithm": choice.algorithm,
        "reason": choice.reason,
        "parameters": count_elements(params),
        "gradient_bytes": count_bytes(params),
        "examples": len(dataset.train),
        "heldout": len(dataset.heldout),
        "collectives": hlo.summary(found),
        "resumed_at": resumed_at + ([step] if step else []),
        "failures": _failures(before.get("failures", []), read_summary(out)) if step else [],
    }


def _failures(known: list[dict[str, Any]], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The failures before this stretch of the run, the newest of which its summary still tells."""
    if "error" not in summary:
        return known
    newest = {"step": summary["steps"], "error": summary["error"]}
    return known if newest in known[-1:] else [*known, newest]


def close_stretch_before(out: Path, reporter: Reporter) -> None:
    """Ends what summary.json and the report tell of a run that now goes on: it is history."""
    if (out / "summary.json").exists():
        (out / "summary.json").unlink()
        write_report(out, reporter)


def write_failure(
    out: Path, error: JaxdpError, clock: Stopwatch, reporter: Reporter, guarded: Mapping[str, Any]
) -> None:
    """Writes summary.json and the report of a run that an error ended.

    Args:
      guarded: what the guard did, for summary.json.
    """
    rows, _ = read_metrics(out / "metrics.jsonl")
    newest = {name: value for row in rows for name, value in row.items()}
    counts = {name: int(newest[name]) for name in _COUNTS if newest.get(name) is not None}
    if "nonfinite" in counts:  # what was left out after going back is not in the state's count
        counts["nonfinite"] += len(guarded.get("left_out", ()))
    summary = {
        "steps": newest.get("step", 0),
        "stopped": True,
        "error": str(error),
        "seconds": clock.rounded(),
        **counts,
        **guarded,
    }
    try:
        write_json(out / "summary.json", summary)
    except StorageError as another:  # the disk may be what the first error is about
        reporter.line(f"warning: {another}")
    write_report(out, reporter)


def complete_report(out: Path, reporter: Reporter) -> None:
    """Writes the report of a complete run that was killed between its summary and its report."""
    summary, report = out / "summary.json", out / "report.html"
    if not report.exists() or report.stat().st_mtime_ns < summary.stat().st_mtime_ns:
        write_report(out, reporter)


def write_report(out: Path, reporter: Reporter) -> None:
    """Writes report.html, or one warning: nothing here may turn a good run into a failed one."""
    try:
        write_atomically(out / "report.html", run_page(out).html)
    except StorageError as error:
        reporter.line(f"warning: {error}")
    except Exception as error:  # a bug of ours, when everything worth keeping is kept already
        reporter.line(f"warning: {out}/report.html: {type(error).__name__}: {error}")

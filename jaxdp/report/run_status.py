"""The top of a run's report: how it ended, and what a reader must know before any number."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from jaxdp.report.recorded import RecordedRun
from jaxdp.report.scale import write
from jaxdp.report.table import notice
from jaxdp.wording import counted, emulated_devices

_CAUSES = {"nonfinite": "numbers that were not finite", "divergence": "replicas that differed"}


def status(run: RecordedRun) -> Iterator[str]:
    """The paragraphs, most important first."""
    yield _end(run)
    yield from _history(run)
    yield from _counts(run.summary)
    yield from _going_back(run.summary)
    yield from _limits(run)


def _end(run: RecordedRun) -> str:
    summary = run.summary
    steps = f" of {run.config.steps}" if run.config else ""
    if not summary or (summary["steps"] < run.last_step and "error" not in summary):
        return notice(
            f"Not ended: the last line of metrics.jsonl is of step {run.last_step}{steps}, and no "
            "summary followed. The run goes on, or was killed."
        )
    if "error" in summary:
        return notice(f"FAILED at step {summary['steps']}{steps}: {summary['error']}", alarm=True)
    if summary["stopped"]:
        return notice(
            f"Stopped on request at step {summary['steps']}{steps}; the same command with --resume "
            "goes on."
        )
    return f"<p>Done at step {summary['steps']}.{escape(_results(summary))}</p>\n"


def _results(summary: Mapping[str, Any]) -> str:
    means = summary.get("eval", {})
    words = ", ".join(f"{name} {write(x)}" for name, x in means.items() if name != "weight")
    return f" Held out: {words}." if words else ""


def _history(run: RecordedRun) -> Iterator[str]:
    """Failures that are over: the run was resumed after them."""
    for failure in run.facts.get("failures", []):
        yield notice(f"Resumed after it had failed at step {failure['step']}: {failure['error']}")


def _counts(summary: Mapping[str, Any]) -> Iterator[str]:
    """Steps that changed nothing."""
    if skipped := summary.get("skipped"):
        yield notice(f"Without an example of weight: {_changed_nothing(skipped)}", alarm=True)
    if nonfinite := summary.get("nonfinite"):
        yield notice(
            f"Loss, gradient or model state not finite: {_changed_nothing(nonfinite)}", alarm=True
        )
    if overflows := summary.get("overflows"):
        yield notice(
            f"Overflow in float16: {_changed_nothing(overflows)} Each of them halved the loss "
            "scale; some are usual."
        )


def _changed_nothing(steps: int) -> str:
    return f"{counted(steps, 'step')}, which changed nothing."


def _going_back(summary: Mapping[str, Any]) -> Iterator[str]:
    """What the guard undid, and what it took away."""
    for back in summary.get("rollbacks", []):
        cause = _CAUSES.get(back["why"], back["why"])
        yield notice(
            f"Went back from step {back['step']} to the checkpoint of step {back['to']}, because "
            f"of {cause}.",
            alarm=True,
        )
    if left_out := summary.get("left_out"):
        yield notice(f"Batches left out: of steps {_ranges(left_out)}.", alarm=True)


def _ranges(steps: list[int]) -> str:
    """[3, 4, 5, 9] -> "3 to 5, 9"."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1].append(step)
        else:
            ranges.append([step])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges)


def _limits(run: RecordedRun) -> Iterator[str]:
    """What the numbers do not say, and what could not be read."""
    if run.environment.get("emulated"):
        where = emulated_devices(run.devices, run.environment.get("processes", 1))
        yield notice(f"{where}. Times say nothing about one.")
    if run.config is None:
        yield notice("config.yaml is missing or cannot be read, so parts are left out.")
    for name in run.unread:
        yield notice(f"{name} is damaged, or of another version, and was left out.")
    if run.damaged:
        lines = counted(run.damaged, "damaged line")
        yield notice(f"Left out of metrics.jsonl: {lines}.")

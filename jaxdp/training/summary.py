"""What a run came to: the content of summary.json, and one line of it."""

from pathlib import Path
from typing import Any

import jax

from jaxdp.assemble import Job
from jaxdp.collectives.tuning import Choice
from jaxdp.guard import Guard
from jaxdp.loop import FitResult
from jaxdp.report.progress import duration
from jaxdp.report.record import Stopwatch
from jaxdp.report.runfolder import read_summary
from jaxdp.training.resuming import Meta
from jaxdp.trees import count_elements, digest
from jaxdp.wording import counted

_TOLD = {"steps", "stopped", "eval", "train_seconds", "devices", "algorithm"}


def complete(out: Path, step: int, steps: int) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do; None if there is something."""
    summary = read_summary(out)  # where it is damaged, it is written anew
    done = summary.keys() >= _TOLD and summary["steps"] == step and not summary["stopped"]
    return summary if done and step >= steps else None


def summarize(
    choice: Choice,
    job: Job,
    result: FitResult,
    steps: int,
    meta: Meta,
    guard: Guard,
    clock: Stopwatch,
) -> dict[str, Any]:
    """The content of summary.json: `steps` are those of the whole run."""
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
        # what was left out after going back is not in the state's count
        "nonfinite": int(state.nonfinite) + len(guard.left_out),
        **({"overflows": int(state.loss_scale.overflows)} if state.loss_scale else {}),
        **guard.record(),
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
        f"trained {duration(summary['train_seconds'])} on {counted(summary['devices'], 'device')}, "
        f"{summary['algorithm']}; {out}/summary.json{report}"
    )

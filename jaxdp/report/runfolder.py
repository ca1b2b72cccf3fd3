"""The files of a run: config.yaml, metrics.jsonl, summary.json, environment.json, checkpoints/.

What is made from them, report.html, is made by `run_page.py`.
"""

import errno
import json
import math
import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxdp import peers
from jaxdp.checkpoints.folders import steps_in
from jaxdp.errors import StorageError, UserError
from jaxdp.types import Device

_MADE = ("metrics.jsonl", "summary.json", "environment.json", "report.html")  # besides config.yaml
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def check_run_folder(out: Path, resume: bool | str) -> bool:
    """Decides whether this is a new run or goes on with one; writes nothing.

    Args:
      out: the run folder, used as given; it may hold other files, but only one run.
      resume: False refuses a folder that holds a run; True demands one; "auto" takes either.

    Returns:
      Whether there is a checkpoint to resume from.

    Raises:
      UserError: the folder and `resume` do not fit.
    """
    try:
        return _goes_on(out, resume)
    except OSError as error:  # a folder that this user may not enter, a name that is too long
        raise UserError(
            f"out: {out} cannot be used: {error.strerror}; choose another folder with --out"
        ) from error


def _goes_on(out: Path, resume: bool | str) -> bool:
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file; expected a folder for the run")
    folder = out / "checkpoints"
    if folder.is_symlink():
        raise UserError(
            f"out: {folder} is a symbolic link, and nothing is deleted through one; give a folder "
            "on that disk with --out"
        )
    saved = bool(steps_in(folder))
    holds_run = (out / "config.yaml").exists()
    if saved and not holds_run:
        raise UserError(
            f"out: {out} holds checkpoints and no config.yaml; put it back, or choose another "
            "folder with --out"
        )
    foreign = next((name for name in _MADE if (out / name).exists()), None)
    if foreign and not holds_run and not read_summary(out):  # ours, if it failed before step 1
        raise UserError(
            f"out: {out} holds {foreign} and no config.yaml: another program's, which a run would "
            "overwrite; choose another folder with --out"
        )
    if holds_run and not resume:
        raise UserError(
            f"out: {out} holds a run; go on with it by --resume, or choose another with --out"
        )
    if resume is True and not saved:
        what = f"the run in {out} saved no checkpoint" if holds_run else f"there is no run in {out}"
        raise UserError(
            f"resume: {what}, so there is nothing to resume; --resume auto starts afresh then, "
            "--out names another folder"
        )
    return saved


def create_run_folder(out: Path) -> None:
    """Creates the folder of a run and its parents.

    Raises:
      StorageError: it cannot be created or written.
    """
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"out: {out} cannot be created: {error.strerror}") from error


def check_shared(out: Path) -> None:
    """Raises UserError, in every process, if one does not see the folder that process 0 made."""
    seen = peers.from_all((out / "checkpoints").is_dir())
    if not all(seen):
        blind = ", ".join(str(r) for r, sees in enumerate(seen) if not sees)
        raise UserError(
            f"out: {out} is not seen by process {blind}; expected a folder that all processes "
            "share, such as one on a network file system, given as an absolute path"
        )


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # a disk that turned read-only refuses even what is not there
            partial.unlink()
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes `values` as indented JSON; numbers that JSON lacks become null."""
    write_atomically(path, json.dumps(_plain(values), indent=2, allow_nan=False) + "\n")


def environment(devices: list[Device]) -> dict[str, Any]:
    """What a run's numbers depend on besides its configuration."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "emulated": devices[0].platform == "cpu" and len(devices) > jax.process_count(),
        "processes": jax.process_count(),
        "x64": bool(jax.config.read("jax_enable_x64")),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "command": sys.argv,
    }


class MetricsLog:
    """metrics.jsonl: one JSON object a line, one line per logged step, whole lines only."""

    def __init__(self, path: Path, resumed_step: int = 0):
        """Opens for appending; lines after `resumed_step`, or cut off by a kill, are dropped."""
        self.path = path
        self._failed = False
        self.drop_after(resumed_step)

    def drop_after(self, step: int) -> None:
        """Drops the lines after a step, and those that are not whole."""
        if self.path.exists():
            lines = self.path.read_bytes()
            kept = [line for line in lines.splitlines() if _step(line) <= step]
            if (whole := b"".join(line + b"\n" for line in kept)) != lines:
                write_atomically(self.path, whole.decode())

    def write(self, row: dict[str, Any]) -> str | None:
        """Appends a row in one write.

        Returns:
          A warning, the first time that writing fails: training goes on without a log.
        """
        line = (json.dumps(_plain(row), allow_nan=False) + "\n").encode()
        try:
            # without O_APPEND's buffer in between, a kill leaves whole lines or one that is cut
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):
                    os.ftruncate(handle, size)  # half a line would spoil the next one
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(handle)
        except OSError as error:
            if not self._failed:
                self._failed = True
                return f"{self.path}: cannot be written ({error.strerror}); training goes on"
        return None


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a metrics.jsonl, and how many lines were damaged and left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    whole = [line for line in lines if _step(line) < math.inf]
    return [json.loads(line) for line in whole], len(lines) - len(whole)


def read_json(path: Path) -> dict[str, Any]:
    """What a file of `write_json` holds; nothing where it is missing or damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def read_summary(out: Path) -> dict[str, Any]:
    """The summary.json of a run; nothing where it is missing, damaged, or of another form."""
    summary = read_json(out / "summary.json")
    forms = {
        "steps": int, "stopped": bool, "eval": dict, "seconds": dict, "left_out": list,
        "rollbacks": list,
    }  # fmt: skip
    has_its_form = {"steps", "stopped"} <= summary.keys() and all(
        isinstance(summary[name], form) for name, form in forms.items() if name in summary
    )
    return summary if has_its_form else {}


def _step(line: bytes) -> float:
    """The step of a line; infinity where the line is not whole."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

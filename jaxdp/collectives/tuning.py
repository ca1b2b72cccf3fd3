"""`auto`: the algorithm that was measured to be the fastest, or psum where nothing was measured.

The table is a readable JSON file, written by `python -m jaxdp.compare --tune`, one entry per
(platform, processes, ranks) with the versions it was measured with.  There are no built-in
constants: what is best depends on machine, network and versions.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.collectives.table import ALGORITHMS
from jaxdp.errors import UserError

_FORMAT = 1


class Choice(NamedTuple):
    """An algorithm and why it was chosen."""

    algorithm: str
    reason: str


def default_file() -> Path:
    """`tune.json` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jaxdp" / "tune.json"


def choose(nbytes: int, n: int, tune_file: str | Path | None = None) -> Choice:
    """The algorithm for an all-reduce of `nbytes` over `n` ranks, on the devices of this process.

    Between two measured sizes the nearer one (in ratio) decides.  Every process reads a file of its
    own: on several hosts these must be equal.

    Raises:
      UserError: `tune_file` is given and missing, or the file cannot be understood.
    """
    path = Path(tune_file) if tune_file is not None else default_file()
    if tune_file is not None and not path.exists():
        raise UserError(
            f"{path}: no such tuning file; write it with python -m jaxdp.compare --tune "
            f"--tune-file {path}"
        )
    platform, processes = jax.default_backend(), jax.process_count()
    unread = f"; {path} is not read" if tune_file is not None else ""
    if n == 1:
        return Choice("psum", f"one rank: nothing to reduce{unread}")
    if platform == "cpu" and processes == 1:
        why = "one CPU process: psum reduces in shared memory, which nothing beats"
        return Choice("psum", f"{why}{unread}")
    if not path.exists():
        how = f"python -m jaxdp.compare --tune writes {path}"
        if processes > 1:  # compare starts them itself, on the CPU of one host
            start = "sync.tune start measures when a run starts"
            how = f"{how} (CPUs of one host); {start}" if platform == "cpu" else start
        return Choice("psum", f"nothing measured yet: {how}")
    entry = _read(path, path.stat().st_mtime_ns).get(_key(platform, processes, n))
    if entry is None:
        return Choice("psum", f"{path} has no entry for {_key(platform, processes, n)}")
    if entry["versions"] != _versions():
        return Choice("psum", f"{path} was measured with {entry['versions']}: tune again")
    best = min(entry["best"], key=lambda row: abs(_ratio(row["bytes"], nbytes)))
    if best["algorithm"] not in ALGORITHMS:
        raise UserError(f"{path}: unknown algorithm {best['algorithm']!r}: tune again")
    return Choice(best["algorithm"], f"fastest at {best['bytes']} bytes in {path}")


def save(rows: Sequence[Mapping[str, Any]], n: int, tune_file: str | Path | None = None) -> Path:
    """Adds the algorithm to use at each size to the table; other entries stay.

    Args:
      rows: with `bytes`, `algorithm`, `time_us`, `samples_us` and `wrong`, from `run_compare`.
      n: ranks they were measured with.
      tune_file: where; None: `default_file()`.

    Raises:
      UserError: the file exists and cannot be understood, or cannot be written.
    """
    path = Path(tune_file) if tune_file is not None else default_file()
    entries = dict(_read(path, path.stat().st_mtime_ns)) if path.exists() else {}
    key = _key(jax.default_backend(), jax.process_count(), n)
    old = entries.get(key)
    # sizes of an earlier sweep stay, if the versions are the same
    best = (
        {row["bytes"]: row for row in old["best"]} if old and old["versions"] == _versions() else {}
    )
    for row in _fastest(rows):
        best[row["bytes"]] = {
            "bytes": row["bytes"],
            "algorithm": row["algorithm"],
            "time_us": round(row["time_us"], 1),
        }
    if best:
        entries[key] = {"versions": _versions(), "best": [best[size] for size in sorted(best)]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps({"format": _FORMAT, "entries": entries}, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; see --tune-file") from error
    return path


def _fastest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The row to use at each size: psum, unless the fastest is beyond doubt faster.

    The fastest of several noisy medians is partly luck, and leaving psum should pay: so the slower
    half of its middle samples must still beat the faster half of psum's (quartiles apart).
    """
    found = []
    rows = [row for row in rows if row["algorithm"] in ALGORITHMS]  # auto is none by itself
    for nbytes in sorted({row["bytes"] for row in rows}):
        right = [row for row in rows if row["bytes"] == nbytes and not row["wrong"]]
        psum = [row for row in right if row["algorithm"] == "psum"]
        best = min(right, key=lambda row: row["time_us"], default=None)
        if best and psum and _quartile(best, 0.75) >= _quartile(psum[0], 0.25):
            best = psum[0]
        if best:
            found.append(best)
    return found


def _quartile(row: Mapping[str, Any], share: float) -> float:
    return float(np.quantile(row.get("samples_us", [row["time_us"]]), share))


def _key(platform: str, processes: int, n: int) -> str:
    kind = jax.devices()[0].device_kind
    return f"{platform} ({kind}), {processes} process(es), {n} ranks"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "jaxlib")}


def _ratio(a: int, b: int) -> float:
    return max(a, 1) / max(b, 1) if a > b else max(b, 1) / max(a, 1)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Mapping[str, Any]:
    """The entries of a file, as it was at the time `changed`."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}, expected {_FORMAT}")
        for entry in content["entries"].values():
            if (
                not entry["versions"]
                or not entry["best"]
                or not all(
                    row["bytes"] > 0 and isinstance(row["algorithm"], str) for row in entry["best"]
                )
            ):
                raise ValueError("an entry without versions or sizes")
        return content["entries"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not a tuning file ({error}); delete it, or write it anew with "
            "python -m jaxdp.compare --tune"
        ) from error

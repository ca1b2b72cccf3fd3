"""A comparison as files: JSON and CSV."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxdp.comparison.run import Comparison
from jaxdp.comparison.text import facts_line
from jaxdp.errors import StorageError


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Rows, fit and environment, ready for `json.dump`."""
    return {
        "where": facts_line(comparison.facts),
        "environment": comparison.facts,
        "seconds": comparison.seconds,
        "model": comparison.network and asdict(comparison.network),
        "rows": comparison.rows,
    }


def write_json(comparison: Comparison, path: str) -> None:
    """Writes `as_json`.  Raises StorageError."""
    _write(path, json.dumps(as_json(comparison), indent=1) + "\n")


def write_csv(comparison: Comparison, path: str) -> None:
    """One line per row, without the samples.  Raises StorageError."""
    where = {"where": facts_line(comparison.facts)}
    rows = [{k: v for k, v in row.items() if k != "samples_us"} | where for row in comparison.rows]
    try:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error

"""What processes say of themselves at a roll call, as lines of JSON, and what is wrong with it."""

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from jaxdp.runtime.differences import differences
from jaxdp.runtime.preflight import MOST_PROCESSES

_MAGIC = "jaxdp roll call 1"


@dataclass(frozen=True)
class Report:
    """What a process says of itself.

    Attributes:
      rank, size, host, pid: who it is.
      versions: of what compiles the program.
      config: key -> value of what it is to train, as far as all must agree on it.
      mistakes: why it cannot start, a line each; then the others are told and do not wait.
    """

    rank: int
    size: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    mistakes: tuple[str, ...] = ()


def differences_of(reports: Iterable[Report]) -> list[str]:
    """What keeps these processes from training together; nothing where they can."""
    reports = sorted(reports, key=lambda report: report.rank)
    if any(report.mistakes for report in reports):
        told = [report.mistakes for report in reports]
        if told.count(told[0]) == len(told):
            return list(told[0])
        return [f"rank {r.rank} ({r.host}): {line}" for r in reports for line in r.mistakes]
    lines = [
        f"two processes are rank {one.rank}: {one.pid} on {one.host} and {two.pid} on {two.host}"
        for one, two in pairwise(reports)
        if one.rank == two.rank
    ]
    by_rank = {r.rank: {"number of processes": str(r.size)} for r in reports}
    if lines := lines + differences(by_rank):
        return lines  # nothing else can be told by rank
    versions = differences({report.rank: report.versions for report in reports})
    return versions + differences({report.rank: report.config for report in reports})


def line_of(content: Mapping[str, Any]) -> bytes:
    """A line that `content_of` reads."""
    return json.dumps({"speaks": _MAGIC, **content}).encode() + b"\n"


def content_of(line: bytes) -> dict[str, Any] | None:
    """What a line of ours holds; None for anything else."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.pop("speaks", None) != _MAGIC:
        return None
    return content


def report_of(line: bytes) -> Report | None:
    """A report, checked type by type: anybody can connect."""
    content = content_of(line)
    if content is None:
        return None
    try:
        report = Report(**content)
        numbers = (report.rank, report.size, report.pid)
        tables = (report.versions, report.config)
        sound = (
            all(type(number) is int and 0 <= number <= 1 << 32 for number in numbers)
            and report.rank < report.size <= MOST_PROCESSES
            and isinstance(report.host, str)
            and all(isinstance(table, dict) for table in tables)
            and all(isinstance(value, str) for table in tables for value in table.values())
            and isinstance(report.mistakes, list)
            and all(isinstance(mistake, str) for mistake in report.mistakes)
        )
    except (TypeError, ValueError):
        return None
    return replace(report, mistakes=tuple(report.mistakes)) if sound else None

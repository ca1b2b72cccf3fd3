"""The files by which a launcher and its workers know of each other, one folder for each attempt.

    heartbeat-R    where rank R is: one record of fixed size, written anew in place
    error-R.json   why it failed, written whole or not at all
    stacks-R.txt   the stacks of all its threads, added at each SIGUSR1

The folder's path reaches a worker as JAXDP_CONTROL.  A reader may come at any moment, and a writer
may be killed at any moment: readers return None for what is not there or not whole.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

CONTROL = "JAXDP_CONTROL"  # environment variable: the folder; absent without a launcher
RECORD_BYTES = 256

T = TypeVar("T")


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is.

    Attributes:
      rank, pid: whose it is.  It can be sent SIGUSR1: a heartbeat is only written by a process
        that dumps its stacks then instead of dying of it.
      phase: one of `phases.PHASES`.
      step: that it is at, counted from 1 as in the log; at the start and while compiling, the last
        one that is done.
      since: `time.monotonic()` when what goes on now began: the phase, its step, or its batch.
      beat: how many records were written; a stuck rank's no longer grows.
    """

    rank: int
    pid: int
    phase: str
    step: int
    since: float
    beat: int

    def record(self) -> bytes:
        """As it stands in the file: JSON, filled up with spaces, and a newline."""
        # by hand: json.dumps takes four times as long, and this runs in every step
        text = (
            f'{{"rank": {self.rank}, "pid": {self.pid}, "phase": "{self.phase}", '
            f'"step": {self.step}, "since": {self.since:.6f}, "beat": {self.beat}}}'
        )
        return text.encode().ljust(RECORD_BYTES - 1) + b"\n"


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    Attributes:
      rank, pid, host: whose it is.
      code: the exit code that it leaves with.
      kind: the class of the exception, or "signal".
      message, traceback: for people; the traceback is empty for a mistake of the user.
      phase, step: where it was, as in its heartbeat.
      time: `time.time()` of the failure.
      cause: "own", or "peer" if another rank's failure is the reason.
    """

    rank: int
    pid: int
    host: str
    code: int
    kind: str
    message: str
    traceback: str
    phase: str
    step: int
    time: float
    cause: Literal["own", "peer"]


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Of a rank, in the control folder."""
    return folder / f"heartbeat-{rank}"


def failure_file(folder: Path, rank: int) -> Path:
    """Of a rank, in the control folder."""
    return folder / f"error-{rank}.json"


def stacks_file(folder: Path, rank: int) -> Path:
    """Of a rank, in the control folder."""
    return folder / f"stacks-{rank}.txt"


def read_heartbeat(folder: Path, rank: int) -> Heartbeat | None:
    """The newest record of a rank; None if there is none."""
    return _read(heartbeat_file(folder, rank), lambda values: Heartbeat(**values))


def write_failure(folder: Path, failure: Failure) -> None:
    """Writes the file of the failed rank; raises OSError where it cannot be written."""
    path = failure_file(folder, failure.rank)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    partial.replace(path)


def read_failure(folder: Path, rank: int) -> Failure | None:
    """Why a rank failed; None if it wrote nothing."""
    return _read(failure_file(folder, rank), lambda values: Failure(**values))


def control_folder() -> Path | None:
    """Of this process; None where no launcher started it."""
    text = os.environ.get(CONTROL)
    return Path(text) if text else None


def _read(path: Path, form: Callable[[dict[str, Any]], T]) -> T | None:
    try:
        return form(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None

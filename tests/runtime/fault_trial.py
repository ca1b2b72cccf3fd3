"""One trial of the fault matrix: a job under the launcher, watched from outside while it fails.

What happened is read from the control folders and from /proc, never from what the job says.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from jaxdp.runtime.control import Heartbeat, read_heartbeat
from jaxdp.runtime.phases import STEP

ROOT = Path(__file__).parent.parent.parent
TIMES = {"step_time_s", "data_wait", "elapsed_s", "per_second", "per_second_per_device"}
LAUNCHER = "launcher"
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
REQUESTS = ("term", "int")
HOLD_S = 1.5  # how long a phase is held up, so that a signal to the launcher meets it
PACE_S = 0.3  # of a step after a request: JAX looks for one once a second
_LOOK_S = 0.01
_LIMIT_S = 600.0  # of one command: only a job that hangs comes to it
_LEFT_S = 5.0  # for what is on its way out to be gone


@dataclass(frozen=True)
class Case:
    """A fault: what is done to whom, where; `step` None is the first time there."""

    action: str
    phase: str
    target: int | str
    step: int | None = None

    def faults(self) -> str:
        """JAXDP_FAULTS of the job."""
        step = "*" if self.step is None else self.step
        if self.target == LAUNCHER:
            fault = f"0:{step}:{self.phase}:slow:{HOLD_S}"
        else:
            fault = f"{self.target}:{step}:{self.phase}:{self.action}"
        return fault + (f",*:*:{STEP}:slow:{PACE_S}" if self.action in REQUESTS else "")

    def __str__(self) -> str:
        who = self.target if self.target == LAUNCHER else f"rank {self.target}"
        return f"{self.action} {who} in {self.phase}" + (f" {self.step}" if self.step else "")


@dataclass
class Seen:
    """What was seen of a job, in seconds of `time.time()`.

    Attributes:
      codes: of the commands, one after the other.
      fault: when it happened; None: it did not.
      attempts: the control folders, in their order.
      gone: pid -> when it was gone; None while it is alive.
      attempt_of: pid -> its attempt.
      new_step: attempt -> when a rank of it had made a step.
      ports: on which coordinators listened.
      left: in words, what was left afterwards.
    """

    codes: list[int] = field(default_factory=list)
    fault: float | None = None
    attempts: list[str] = field(default_factory=list)
    gone: dict[int, float | None] = field(default_factory=dict)
    attempt_of: dict[int, str] = field(default_factory=dict)
    first_step: dict[str, int] = field(default_factory=dict)
    new_step: dict[str, float] = field(default_factory=dict)
    ports: set[int] = field(default_factory=set)
    left: list[str] = field(default_factory=list)

    def struck(self) -> str | None:
        """The attempt in which the fault happened."""
        if self.fault is None:
            return None
        return next(
            (a for pid, a in self.attempt_of.items() if (self.gone[pid] or 0) >= self.fault), None
        )

    def gone_s(self) -> float | None:
        """Seconds from the fault until the last rank of its attempt was gone."""
        struck = self.struck()
        ends = [self.gone[pid] for pid, a in self.attempt_of.items() if a == struck]
        if self.fault is None or not ends or None in ends:
            return None
        return max(end for end in ends if end is not None) - self.fault

    def next_step_s(self) -> float | None:
        """Seconds from the fault until a later attempt had made a step; None: none was left."""
        struck = self.struck()
        if self.fault is None or struck is None:
            return None
        later = self.attempts[self.attempts.index(struck) + 1 :]
        times = [self.new_step[attempt] for attempt in later if attempt in self.new_step]
        return min(times) - self.fault if times else None


class Trial:
    """A job with a fault, in a folder of its own."""

    def __init__(
        self, case: Case | None, folder: Path, launch: Sequence[str], train: Sequence[str]
    ):
        """Takes the options of the launcher and of the training; runs nothing yet."""
        self.case, self.folder, self.out = case, folder, folder / "run"
        self.log, self.tmp = folder / "log", folder / "tmp"
        self.tmp.mkdir(parents=True)
        self.mark = new_mark()
        self.command = [
            sys.executable, "-m", "jaxdp.launch", *launch, "--log-dir", str(self.log),
            "-m", "jaxdp.train", *train, "--out", str(self.out),
        ]  # fmt: skip
        self.seen = Seen()
        self._pid = 0

    def run(self, again: Sequence[int]) -> Seen:
        """Runs the job; if it ends with a code of `again`, the same command once more."""
        self.seen.codes.append(self._once())
        if self.seen.codes[-1] in again:
            self.seen.codes.append(self._once())
        self.seen.left = self._left()
        return self.seen

    def _once(self) -> int:
        faults = {"JAXDP_FAULTS": self.case.faults()} if self.case else {}
        given = {"TMPDIR": str(self.tmp)} | faults
        with open(self.folder / "output.txt", "ab") as output:
            process = start_job(self.command, self.mark, given, output)
            self._pid, deadline = process.pid, time.monotonic() + _LIMIT_S
            while process.poll() is None and time.monotonic() < deadline:
                self._look()
                time.sleep(_LOOK_S)
            if process.poll() is None:
                process.kill()
            code = process.wait()
        settled = time.monotonic() + _LEFT_S
        while None in self.seen.gone.values() and time.monotonic() < settled:
            self._look()
            time.sleep(_LOOK_S)
        return code

    def _look(self) -> None:
        seen, now = self.seen, time.time()
        for path in attempts(self.log):
            if path.name not in seen.attempts:
                seen.attempts.append(path.name)
        self._see_children()
        for pid, gone in seen.gone.items():
            if gone is None and not is_alive(pid):
                seen.gone[pid] = now
        if seen.attempts:
            self._see_heartbeats(seen.attempts[-1], now)
        if seen.fault is None and (self.out / ".faults").is_dir():
            for marker in (self.out / ".faults").iterdir():
                seen.fault = marker.stat().st_mtime

    def _see_children(self) -> None:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
            for pid in {int(child) for child in children} - self.seen.gone.keys():
                given = environment_of(pid)
                if "JAX_PROCESS_ID" in given or "JAXDP_CONTROL" in given:
                    self.seen.gone[pid] = None
                    self.seen.attempt_of[pid] = Path(given["JAXDP_CONTROL"]).name
                    port = given.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")[2]
                    self.seen.ports |= {int(port)} if port else set()

    def _see_heartbeats(self, attempt: str, now: float) -> None:
        for path in (self.log / attempt).glob("heartbeat-*"):
            beat = read_heartbeat(path.parent, int(path.name.split("-")[1]))
            if beat is None:
                continue
            if beat.phase == STEP:
                first = self.seen.first_step.setdefault(attempt, beat.step)
                if beat.step > first:
                    self.seen.new_step.setdefault(attempt, now)
            if self.seen.fault is None and self._is_time(beat):
                self.seen.fault = now
                os.kill(self._pid, SIGNALS[self.case.action])

    def _is_time(self, beat: Heartbeat) -> bool:
        """Whether the launcher is to be sent its signal: rank 0 is held up where the case says."""
        case = self.case
        if case is None or case.target != LAUNCHER or beat.rank:
            return False
        return beat.phase == case.phase and case.step in (None, beat.step)

    def _left(self) -> list[str]:
        """What the job left behind, after a moment for what is on its way out."""
        deadline = time.monotonic() + _LEFT_S
        while (left := list(self._leftovers())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _leftovers(self) -> Iterator[str]:
        for pid in marked(self.mark):
            yield f"process {pid}: {command_of(pid)}"
        yield from (f"port {port}" for port in self.seen.ports & listening())
        yield from (f"in TMPDIR: {path.name}" for path in self.tmp.iterdir())
        yield from (
            f"in the run folder: {path.relative_to(self.out)}"
            for pattern in ("*.partial", "*tmp*")
            for path in self.out.rglob(pattern)
        )

    def end(self) -> None:
        """Kills what is left of the job."""
        kill_marked(self.mark)


def new_mark() -> str:
    """NAME=VALUE for the environment of a job, by which its processes are found."""
    return f"JAXDP_TRIAL={uuid.uuid4()}"


def start_job(
    command: Sequence[str], mark: str, given: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen:
    """Starts a launcher in a session of its own, on CPUs, without this process's settings."""
    name, value = mark.split("=")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAXDP_", "XLA_"))}
    plain |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", name: value}
    return subprocess.Popen(
        command, env=plain | given, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip


def attempts(log: Path) -> list[Path]:
    """The folders of a job's attempts below its --log-dir, in their order."""
    return sorted(log.glob("attempt-*"), key=lambda path: int(path.name.split("-")[1]))


def kill_marked(mark: str) -> None:
    """Kills what is left of a job, known by its mark."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def result(out: Path) -> dict[str, object]:
    """What a run came to, apart from times: to be the same to the bit."""
    try:
        summary = json.loads((out / "summary.json").read_text())
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    kept = [{name: x for name, x in row.items() if name not in TIMES} for row in rows]
    told = {name: summary.get(name) for name in ("steps", "stopped", "params_digest", "eval")}
    return told | {"rows": kept}


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def environment_of(pid: int) -> dict[str, str]:
    """Of a process; nothing where it cannot be read."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "gone"


def marked(mark: str) -> list[int]:
    """The processes that have the mark in their environment, whoever their parents are now."""
    name, value = mark.split("=")
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if is_alive(pid) and environment_of(pid).get(name) == value]


def listening() -> set[int]:
    """The TCP ports on which somebody listens."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return ports

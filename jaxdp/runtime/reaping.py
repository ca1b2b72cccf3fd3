"""Ends every process of a job, also those that its workers started.

A process belongs to the job if it is in a worker's session, or if the job's mark is in the
environment with which it was started, which covers those that began a session of their own.  One
that did both, a new session and an empty environment, is not found.  Needs Linux's /proc: elsewhere
a worker's process group is all that can be ended.

Also a program, run without our package: told on its standard input about sessions and folders, it
waits until the input ends, and clears up unless the last line was `done`.  That is how a launcher
killed by SIGKILL leaves nothing behind.
"""

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

MARK = "JAXDP_JOB"
_ROUND_S = 0.01


class Job(NamedTuple):
    """How the processes of a job are known.

    Attributes:
      mark: what its workers carry in the environment variable `MARK`.
      sessions: process ids of workers, each the leader of its session.
      before: only members of a session that started before, in seconds since the machine's start.
    """

    mark: str
    sessions: frozenset[int]
    before: float = math.inf


def end_job(job: Job, within_s: float = 2.0) -> list[int]:
    """Sends SIGKILL to every process of a job until none is left, or the time is over.

    The numbers of its sessions must not be other processes' by now: the caller has not reaped the
    leaders yet, or gives `before`.

    Returns:
      Process ids that are still there: one inside a call to a dead disk, for example.
    """
    for session in job.sessions if job.before == math.inf else ():  # most of them, at once
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
    if not os.path.isdir("/proc/self"):
        return []
    deadline = time.monotonic() + within_s
    while found := members(job):
        for pid in found:
            _kill(pid, job)
        if time.monotonic() > deadline:
            return found
        time.sleep(_ROUND_S)
    return []


def members(job: Job) -> list[int]:
    """The living processes of a job."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_of(int(name), job)]


def state(pid: int) -> str:
    """The kernel's letter for a process: T is stopped, Z is dead, R and S are alive; "" unknown."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _is_of(pid: int, job: Job) -> bool:
    fields = _stat(pid)
    if not fields or fields[0] in "ZX" or pid == os.getpid():
        return False
    if int(fields[3]) in job.sessions and int(fields[19]) / os.sysconf("SC_CLK_TCK") <= job.before:
        return True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        marks = [e for e in file.read().split(b"\0") if e.startswith(f"{MARK}=".encode())]
        return any(job.mark.encode() in e.partition(b"=")[2].split(b":") for e in marks)
    return False


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state, the third, on; [] if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name before may hold anything, blanks and brackets too
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def _kill(pid: int, job: Job) -> None:
    """Kills a process if it is still ours."""
    try:
        _kill_held(pid, job)
    except (AttributeError, OSError):  # not in this Python, as of conda; refused; or it has gone
        with contextlib.suppress(OSError):
            if _is_of(pid, job):
                os.kill(pid, signal.SIGKILL)


def _kill_held(pid: int, job: Job) -> None:
    """Kills a process of ours, held so that its number cannot go to another one meanwhile."""
    held = os.pidfd_open(pid)
    try:
        if _is_of(pid, job):
            signal.pidfd_send_signal(held, signal.SIGKILL)
    finally:
        os.close(held)


def watch_over(lines: Iterable[str]) -> None:
    """Takes notes, one a line, and acts on them when they end, unless the last is `done`.

    `mark M`; `session PID`; `reaped PID`, a session whose number may be anybody's from now on;
    `folder PATH`, to be removed.
    """
    mark, sessions, folders = "", set(), []
    for line in lines:
        kind, _, value = line.rstrip("\n").partition(" ")
        if kind == "done":
            return
        if kind == "mark":
            mark = value
        elif kind == "session":
            sessions.add(int(value))
        elif kind == "reaped":
            sessions.discard(int(value))
        elif kind == "folder":
            folders.append(value)
    # a number that became free since then may be another process's by now
    now = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else math.inf
    end_job(Job(mark, frozenset(sessions), now))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch_over(sys.stdin)

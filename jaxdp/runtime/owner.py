"""Who a process is, so that another one can find out whether it is still there."""

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

_PROC = Path("/proc")


class Owner(NamedTuple):
    """A process, told apart from all others, earlier ones with its number too.

    Attributes:
      host: the machine's name, for people.
      place: the boot of the machine and the namespace in which `pid` counts (two containers of one
        machine have numbers of their own); None where the system does not tell.
      pid: the process.
      started: when it started, in the kernel's ticks; None where the system does not tell.
    """

    host: str
    place: str | None
    pid: int
    started: int | None


def this_process() -> Owner:
    """The process that asks."""
    pid = os.getpid()
    return Owner(socket.gethostname(), _place(), pid, start_ticks(pid))


def read_owner(values: dict[str, Any]) -> Owner | None:
    """The owner that `Owner._asdict` wrote; None where it is not whole."""
    forms = {"host": str, "place": str | None, "pid": int, "started": int | None}
    if not all(name in values and isinstance(values[name], form) for name, form in forms.items()):
        return None
    return Owner(**{name: values[name] for name in forms})


def is_alive(owner: Owner) -> bool | None:
    """Whether it runs; None where that cannot be seen from here."""
    if owner.place is None or owner.started is None or owner.place != _place():
        return None
    if (started := start_ticks(owner.pid)) is not None:
        return started == owner.started
    try:
        os.kill(owner.pid, 0)
    except PermissionError:  # another user's, which some systems hide
        return None
    except (OSError, OverflowError):
        return False
    return False  # dead, and not yet collected by the process that started it


def start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if it does not run."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (OSError, ValueError):
        return None
    # the name, in brackets, may hold anything; behind it: the state, .. and the 22nd field of all
    state, *fields = stat.rpartition(")")[2].split()
    # Z, X: dead
    return None if state in "ZX" else int(fields[18])


def _place() -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return None

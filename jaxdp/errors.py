"""Errors and exit codes: every way in which a program of ours may end.

A mistake of the user is one line: what was given, what was expected, what to do.  A traceback is
only ever shown for a fault of ours.
"""

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

_FULL = (errno.ENOSPC, errno.EDQUOT)
# the world's, not ours: what a path names may not be used so
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)

_INSTALL = "pip install -e . here, or enter the environment that has it: . .venv/bin/activate"


class Exit(IntEnum):
    """Exit codes of every program (a killed process ends with 128 + signal number)."""

    DONE = 0
    BUG = 1
    USER = 2  # never restarted: the same command would fail again
    FAULT_FOUND = 3  # check or compare found something wrong
    NUMERICS = 4  # non-finite values, diverged replicas
    STORAGE = 5
    PEER = 6  # a peer is lost or stuck: restart me
    SAVED = 75  # saved on request: run me again


class JaxdpError(Exception):
    """An error whose message is written for the user; `code` is the program's exit code."""

    code = Exit.BUG
    told_by_first = False  # all processes of a job raise it: process 0 tells it for all


class UserError(JaxdpError):
    """A mistake of the user.  `lines` holds one complete sentence per mistake."""

    code = Exit.USER

    def __init__(self, *lines: str):
        super().__init__("\n".join(lines))
        self.lines = lines


class AgreedError(UserError):
    """A mistake that every process of a job knows of."""

    told_by_first = True


class NumericsError(JaxdpError):
    """The numbers went wrong: a non-finite loss or gradient, replicas that differ."""

    code = Exit.NUMERICS


class StorageError(JaxdpError):
    """A disk is full, a file is damaged, a folder cannot be written."""

    code = Exit.STORAGE

    def __init__(self, *lines: str):
        super().__init__("\n".join(lines))


class PeerError(JaxdpError):
    """Another process of the job is lost, or never came."""

    code = Exit.PEER


class Ending(NamedTuple):
    """How a program ends: its exit code, and what it says on stderr; "" for nothing."""

    code: int
    text: str


def exit_code(program: Callable[[], int]) -> int:
    """Runs a program; every way in which it may end becomes words on stderr and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have letters that a log cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    code = _ended(program)
    # what print holds back would else fail when the interpreter ends, with a traceback
    flushed = _ended(_flush)
    return code or flushed


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """While modules are imported, Ctrl-C ends the process by itself: nothing is there to be saved.

    An exception in the middle of an extension's first lines can crash the interpreter instead.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored
    try:
        if usual:
            signal.signal(signal.SIGINT, _leave)
        yield
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def _flush() -> int:
    if sys.stdout is not None:
        sys.stdout.flush()
    return Exit.DONE


def ending_of(error: BaseException) -> Ending:
    """The words and the exit code with which a program ends that this error ends."""
    if isinstance(error, JaxdpError):
        return Ending(error.code, str(error))
    if isinstance(error, BrokenPipeError):  # the reader left: `| head`
        return Ending(128 + signal.SIGPIPE, "")
    if isinstance(error, SystemExit):  # argparse's, after --help
        return Ending(error.code if isinstance(error.code, int) else Exit.DONE, "")
    if isinstance(error, KeyboardInterrupt):
        return Ending(128 + signal.SIGINT, "interrupted")
    if isinstance(error, OSError) and error.errno in _FULL:
        what = error.filename or "output"
        return Ending(Exit.STORAGE, f"{what}: cannot be written: {error.strerror}")
    if isinstance(error, OSError) and error.errno in _REFUSED and error.filename:
        return Ending(Exit.STORAGE, f"{error.filename}: {error.strerror}")
    if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):  # XLA's
        found = str(error).partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
        return Ending(
            Exit.USER,
            f"out of memory{found and f' ({found})'}; expected less at a time: a smaller batch or "
            "model, more microbatches, or more devices",
        )
    if isinstance(error, ModuleNotFoundError) and _is_package(error.name):
        return Ending(Exit.USER, f"{error.name} is not installed; {_INSTALL}")
    lines = "".join(traceback.format_exception(error))
    return Ending(Exit.BUG, f"{lines}this is a bug of jaxdp; please report it with the lines above")


def _is_package(name: str | None) -> bool:
    """Whether a name is that of a whole package, neither ours nor Python's own."""
    if name is None or "." in name or name == "jaxdp":
        return False
    return name not in sys.stdlib_module_names


def _ended(program: Callable[[], int]) -> int:
    try:
        return program()
    except BaseException as error:
        ending = ending_of(error)
        if isinstance(error, BrokenPipeError) or getattr(error, "errno", None) in _FULL:
            discard_output()
        if ending.text:
            print(ending.text, file=sys.stderr)
        return ending.code


def discard_output() -> None:
    """What cannot be written goes nowhere, so that it does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno() if sys.stdout else 1)

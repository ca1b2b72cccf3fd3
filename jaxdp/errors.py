"""Errors and exit codes: every way in which a program of ours may end.

A mistake of the user is one line: what was given, what was expected, what to do.  A traceback is
only ever shown for a fault of ours.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum


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


class UserError(JaxdpError):
    """A mistake of the user.  `lines` holds one complete sentence per mistake."""

    code = Exit.USER

    def __init__(self, *lines: str):
        super().__init__("\n".join(lines))
        self.lines = lines


class NumericsError(JaxdpError):
    """The numbers went wrong: a non-finite loss or gradient, replicas that differ."""

    code = Exit.NUMERICS


class StorageError(JaxdpError):
    """A disk is full, a file is damaged, a folder cannot be written."""

    code = Exit.STORAGE

    def __init__(self, *lines: str):
        super().__init__("\n".join(lines))


def exit_code(program: Callable[[], int]) -> int:
    """Runs a program; every way in which it may end becomes words on stderr and an exit code."""
    try:
        return program()
    except JaxdpError as error:
        print(error, file=sys.stderr)
        return error.code
    except BrokenPipeError:  # the reader left: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        print("this is a bug of jaxdp; please report it with the lines above", file=sys.stderr)
        return Exit.BUG

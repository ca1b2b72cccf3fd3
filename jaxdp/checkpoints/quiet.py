"""Keeps to itself what Orbax and its threads say: errors come back as exceptions too.

Needs no JAX.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

# Orbax's steps, and tracebacks of what it raises as well
_LOGGERS = ("absl", "asyncio")


@contextmanager
def quiet() -> Iterator[None]:
    """While it lasts, neither Orbax's logs nor its threads' tracebacks reach the terminal.

    Where one of several writes fails, Orbax closes the event loop that waits for them; those that
    end later find it closed, in a thread of TensorStore's, which hands the exception to the hooks
    of the interpreter (Orbax 0.12.8).
    """
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    hook, unraisable = sys.excepthook, sys.unraisablehook

    def excepthook(kind: type[BaseException], error: BaseException, at: TracebackType | None):
        if not _is_late(error):
            hook(kind, error, at)

    def unraisablehook(found: "sys.UnraisableHookArgs"):
        if not _is_late(found.exc_value):
            unraisable(found)

    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook
    try:
        yield
    finally:
        sys.excepthook, sys.unraisablehook = hook, unraisable
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _is_late(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"

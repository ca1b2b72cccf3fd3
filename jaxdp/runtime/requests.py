"""Signals by which somebody asks the job to end: noted, and acted on between two looks."""

import contextlib
import signal
from collections.abc import Iterator

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Requests:
    """What was asked.

    Attributes:
      number: the first signal that asked the job to end; None while none did.
      reason: in words.
      at_once: whether Ctrl-C was pressed a second time: no more waiting.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.reason = ""
        self.at_once = False
        self._interrupts = 0

    def note(self, number: int, reason: str = "") -> None:
        """Notes a signal, received by this launcher or met otherwise (`reason` tells how)."""
        if self.number is None:
            self.number = number
            self.reason = reason or signal.Signals(number).name
        if number == signal.SIGINT and not reason:  # only a received one is a press of Ctrl-C
            self._interrupts += 1
            self.at_once = self._interrupts > 1


@contextlib.contextmanager
def noted_requests() -> Iterator[Requests]:
    """Notes SIGTERM, SIGINT and SIGHUP inside the block; those that are ignored stay so (nohup)."""
    requests = Requests()
    before = {number: signal.getsignal(number) for number in REQUESTS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: requests.note(number))
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

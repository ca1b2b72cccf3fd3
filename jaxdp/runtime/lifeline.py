"""The connections of the roll call, kept open: a process that dies closes its own.

Rank 0 holds one to every other rank, the others theirs to rank 0.  A thread waits for what comes:
the word of a rank that leaves, passed on by rank 0, or the end of a connection without a word.
So all ranks know within milliseconds, whatever they are at, and which rank it was.  Left to itself
JAX finds a dead peer in the next collective, or after a heartbeat's time, and is then aborted.

A process that is stopped or stuck keeps its connection: that is for the launcher's deadlines.  A
link that goes down is found by TCP's own probes.
"""

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from jaxdp.errors import Exit
from jaxdp.runtime.reports import content_of, line_of
from jaxdp.runtime.rollcall import Roll

_MOST_BYTES = 1 << 16
_MOST_WORDS = 2000  # of a reason that is passed on
# a silent link is given up after idle + count * interval = 20 s; probes are answered by the kernel,
# so that a busy or stopped process is not taken for a dead one
_KEEPALIVE = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


@dataclass(frozen=True)
class Loss:
    """A peer that left before the end.

    Attributes:
      rank, host: whose process it was.
      code: the exit code that it left with; None if it could not say.
      why: what it said, one line.
    """

    rank: int
    host: str
    code: int | None = None
    why: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank} on {self.host}"
        if self.code is None:
            return f"{who} is lost: it died without a word, or its link is down"
        return f"{who} left with code {self.code}{': ' if self.why else ''}{self.why}"


class Lifeline:
    """One process's end of the connections.

    Args:
      rank: of this process.
      roll: as the roll call left it.
      on_loss: called in a thread, once, for the first peer that leaves before the end.
    """

    def __init__(self, rank: int, roll: Roll, on_loss: Callable[[Loss], None]):
        self._rank, self._hosts, self._on_loss = rank, roll.hosts, on_loss
        self._rank_of = {connection: peer for peer, connection in roll.peers.items()}
        self._received = {connection: bytearray() for connection in self._rank_of}
        self._done: set[int] = set()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        for connection in self._rank_of:
            connection.setblocking(False)
            _keep_alive(connection)
        self._thread = threading.Thread(target=self._watch, name="jaxdp-lifeline", daemon=True)
        self._thread.start()

    def leave(self, code: int, why: str = "") -> None:
        """Tells the peers that this process ends, and with which code; 0: as it should."""
        self._tell(Loss(self._rank, self._hosts[self._rank], code, why[:_MOST_WORDS]))

    def close(self) -> None:
        """Ends the thread and the connections; the peers have been told."""
        self._closed = True
        self._wake.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        for connection in self._rank_of:
            connection.close()
        self._woken.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in [*self._rank_of, self._woken]:
                selector.register(connection, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select():
                    connection = key.fileobj
                    if self._closed or connection is self._woken:
                        return
                    assert isinstance(connection, socket.socket)
                    loss, open_ = self._read(connection)
                    if not open_:
                        selector.unregister(connection)
                    if loss is not None:
                        if self._rank == 0:
                            self._tell(loss)
                        self._on_loss(loss)
                        return

    def _read(self, connection: socket.socket) -> tuple[Loss | None, bool]:
        """A loss that a connection tells of, and whether it stays open."""
        rank, received = self._rank_of[connection], self._received[connection]
        try:
            data = connection.recv(1 << 12)
        except BlockingIOError:
            return None, True
        except OSError:
            data = b""
        received += data
        while b"\n" in received:
            line, _, rest = bytes(received).partition(b"\n")
            received[:] = rest
            loss = self._loss_of(line)
            if loss is not None and loss.code != Exit.DONE:
                return loss, True
            if loss is not None:
                self._done.add(loss.rank)
        if data and len(received) <= _MOST_BYTES:
            return None, True
        return (None if rank in self._done else Loss(rank, self._hosts[rank])), False

    def _loss_of(self, line: bytes) -> Loss | None:
        content = content_of(line) or {}
        with suppress(KeyError, TypeError, ValueError, IndexError):
            rank, code = int(content["rank"]), content["code"]
            code = None if code is None else int(code)
            return Loss(rank, self._hosts[rank], code, str(content["why"]))
        return None

    def _tell(self, loss: Loss) -> None:
        line = line_of({"rank": loss.rank, "code": loss.code, "why": loss.why})
        for connection, rank in self._rank_of.items():
            if rank != loss.rank:
                with suppress(OSError):  # a few bytes: they fit into the kernel's buffer
                    connection.send(line)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if option := getattr(socket, name, None):  # Linux's
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

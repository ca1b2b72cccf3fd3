"""All processes of a job report to rank 0 before JAX starts, on the port that JAX will use.

    rank r  ->  rank 0    one line of JSON: who I am, what I run, what I am to train
    rank 0  ->  rank r    one line: all are here; or why the job is refused, by rank

So missing ranks are named while the others wait, and what must agree is compared before anything
is allocated.  The connections stay open: `lifeline` goes on with them.

Whatever else may connect to an open port, a scanner or a browser, is dropped and the roll goes on.
"""

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from jaxdp.errors import AgreedError, PeerError, UserError
from jaxdp.runtime.place import ADDRESS
from jaxdp.runtime.preflight import Endpoint, join_address
from jaxdp.runtime.reports import Report, content_of, differences_of, line_of, report_of
from jaxdp.wording import ranks

_MOST_BYTES = 1 << 18
_MOST_STRANGERS = 256  # connections that have not said who they are
_STRANGER_S = 10.0
_TELL_S = 5.0
_RETRY_S = 0.2
_CONNECT_S = 5.0
_SEND_S = 2.0
_GRACE_S = 10.0
_HUNG_UP = "it hung up"
_HUNG_UP_S = 10.0  # again and again: rank 0 does so where it ends, but then nobody listens
_PATIENT_S = 1.0  # who waited for so long was rank 0
_PICTURE_S = 3.0  # after the first difference, for the rest to report: then all can be named

Tell = Callable[[str], None]


@dataclass
class Roll:
    """A roll that is complete.

    Attributes:
      hosts: of every rank.
      peers: rank -> open connection; of rank 0 to all others, of the others to rank 0.
      ip: the address of this host at which the other ranks of the job reach it.
    """

    hosts: list[str]
    peers: dict[int, socket.socket]
    ip: str


def hold_roll(server: socket.socket, own: Report, timeout_s: float, tell: Tell) -> Roll:
    """Rank 0: waits for all others, and answers them.  `server` is closed.

    Raises:
      AgreedError: what they are to run differs, or a rank cannot start.
      PeerError: ranks are missing after `timeout_s` seconds.
    """
    with server, _Desk(server, own) as desk:
        start = told = agreed = time.monotonic()
        while desk.missing():
            now = time.monotonic()
            if not desk.differences():
                agreed = now
            deadline = start + timeout_s if agreed == now else agreed + _PICTURE_S
            if now >= deadline:
                break
            if now - told >= _TELL_S:
                told = now
                tell(_waiting(desk.missing(), own.size, now - start, timeout_s))
            desk.serve(min(0.5, deadline - now))
        if lines := desk.differences():
            desk.answer({"refused": lines})
            raise AgreedError(*lines)
        if missing := desk.missing():
            line = f"{ranks(missing)} of {own.size} did not come within {timeout_s:g} s"
            desk.answer({"missing": line})
            raise PeerError(f"{line}: start all of them again when it is clear why")
        hosts = [r.host for r in sorted(desk.reports(), key=lambda report: report.rank)]
        desk.answer({"hosts": hosts})
        return desk.complete(hosts)


def answer_roll(endpoint: Endpoint, own: Report, timeout_s: float, tell: Tell) -> Roll:
    """Any other rank: reports to rank 0 and waits until all have.

    Raises:
      AgreedError: what they are to run differs, or a rank cannot start.
      UserError: something else answers.
      PeerError: rank 0 does not answer, or other ranks are missing, after `timeout_s` seconds.
    """
    start = told = welcome = time.monotonic()
    outcome = "no time"
    while (now := time.monotonic()) < start + timeout_s:
        outcome = _try(endpoint, own, timeout_s, start + timeout_s - now, tell)
        if isinstance(outcome, Roll):
            return outcome
        later = time.monotonic()
        if outcome != _HUNG_UP or later - now > _PATIENT_S:
            welcome = later
        if later - welcome > _HUNG_UP_S:
            raise UserError(
                f"{ADDRESS}: what listens at {endpoint} hangs up: is it something else, or is the "
                f"job complete, with another process as rank {own.rank}?"
            )
        if later - told >= _TELL_S:
            told = later
            waited = f"{later - start:.0f} s of {timeout_s:g} s"
            tell(f"rank {own.rank}: waiting for rank 0 at {endpoint}: {outcome} ({waited})")
        time.sleep(_RETRY_S)
    raise PeerError(f"rank 0 did not answer at {endpoint} within {timeout_s:g} s: {outcome}")


def _try(
    endpoint: Endpoint, own: Report, timeout_s: float, left_s: float, tell: Tell
) -> Roll | str:
    """One connection to rank 0: the roll, or why there was none."""
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(
                socket.create_connection(endpoint[:2], timeout=min(_CONNECT_S, left_s))
            )
            connection.sendall(line_of(asdict(own)))
            # it may have started later, and then waits for longer than we would
            answer = _answer(connection, own, time.monotonic() + timeout_s + _GRACE_S, tell)
            if answer is None:
                return _HUNG_UP
            roll = _accepted(answer, connection)
            stack.pop_all()  # it stays open
            return roll
        except (ConnectionResetError, BrokenPipeError):
            return _HUNG_UP
        except OSError as error:  # it may start later than we do
            return error.strerror or str(error)


def _waiting(missing: list[int], size: int, seconds: float, timeout_s: float) -> str:
    return f"waiting for {ranks(missing)} of {size} ({seconds:.0f} s of {timeout_s:g} s)"


class _Desk:
    """Where rank 0 takes reports."""

    def __init__(self, server: socket.socket, own: Report):
        self.own = own
        self._suspicious = bool(own.mistakes)
        self._reported: dict[socket.socket, Report] = {}
        self._strangers: dict[socket.socket, tuple[bytearray, float]] = {}
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._server = server
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> "_Desk":
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for connection in [*self._strangers, *self._reported]:
            connection.close()

    def reports(self) -> list[Report]:
        """Of all that are here."""
        return [self.own, *self._reported.values()]

    def differences(self) -> list[str]:
        """What keeps those that are here from training together."""
        if not self._suspicious:
            return []
        lines = differences_of(self.reports())
        self._suspicious = bool(lines)  # whose it was may have gone
        return lines

    def missing(self) -> list[int]:
        """The ranks that have not reported."""
        here = {report.rank for report in self.reports()}
        return [rank for rank in range(self.own.size) if rank not in here]

    def serve(self, seconds: float) -> None:
        """Takes what comes within so many seconds."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._server:
                self._welcome()
            elif connection in self._strangers:
                self._read(connection)
            else:  # who has reported says nothing more: it has ended
                self._forget(connection)
        now = time.monotonic()
        for connection, (_, until) in list(self._strangers.items()):
            if now > until:
                self._forget(connection)

    def answer(self, content: dict[str, Any]) -> None:
        """Tells all that have reported."""
        for connection in self._reported:
            with suppress(OSError):
                connection.settimeout(_SEND_S)
                connection.sendall(line_of(content))

    def complete(self, hosts: list[str]) -> Roll:
        """Hands over the connections."""
        peers = {report.rank: connection for connection, report in self._reported.items()}
        self._reported = {}
        # all came to one address: the one at which this host is known
        ip = next(iter(peers.values())).getsockname()[0]
        return Roll(hosts, peers, ip)

    def _welcome(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if len(self._strangers) >= _MOST_STRANGERS:
                self._forget(next(iter(self._strangers)))
            self._strangers[connection] = (bytearray(), time.monotonic() + _STRANGER_S)
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        received, _ = self._strangers[connection]
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if b"\n" in data and (report := report_of(bytes(received))) is not None:
            del self._strangers[connection]
            self._suspicious |= self._conflicts(report)
            self._reported[connection] = report
        elif not data or b"\n" in data or len(received) > _MOST_BYTES:
            self._forget(connection)

    def _conflicts(self, report: Report) -> bool:
        own = self.own
        alike = (report.size, report.versions, report.config) == (
            own.size, own.versions, own.config,
        )  # fmt: skip
        twice = any(report.rank == other.rank for other in self.reports())
        return not alike or twice or bool(report.mistakes)

    def _forget(self, connection: socket.socket) -> None:
        self._strangers.pop(connection, None)
        self._reported.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()


def _answer(
    connection: socket.socket, own: Report, deadline: float, tell: Tell
) -> dict[str, Any] | None:
    """Rank 0's, or None where it hung up."""
    received, start = bytearray(), time.monotonic()
    while (now := time.monotonic()) < deadline:
        connection.settimeout(min(_TELL_S, deadline - now))
        try:
            data = _up_to_a_line(connection)
        except TimeoutError:
            tell(
                f"rank {own.rank}: reported to rank 0, which waits for others "
                f"({time.monotonic() - start:.0f} s)"
            )
            continue
        received += data
        if not data:
            return None
        if b"\n" in data or len(received) > _MOST_BYTES:
            if (content := content_of(bytes(received))) is None:
                peer = join_address(*connection.getpeername()[:2])
                raise UserError(
                    f"{ADDRESS}: what answers at {peer} is not rank 0 of a job of ours; give all "
                    "ranks a port that is free on the host of rank 0"
                )
            return content
    raise PeerError("reported to rank 0, and was not answered in time: see what it waits for")


def _up_to_a_line(connection: socket.socket) -> bytes:
    """What has come, to the end of a line at most: what follows the answer is for the lifeline."""
    seen = connection.recv(1 << 16, socket.MSG_PEEK)
    return connection.recv(seen.find(b"\n") + 1 or len(seen)) if seen else b""


def _accepted(answer: dict[str, Any], connection: socket.socket) -> Roll:
    if "refused" in answer:
        raise AgreedError(*map(str, answer["refused"]))
    if "missing" in answer:
        raise PeerError(str(answer["missing"]))
    return Roll(list(map(str, answer["hosts"])), {0: connection}, connection.getsockname()[0])

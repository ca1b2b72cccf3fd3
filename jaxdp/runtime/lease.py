"""A lock on a run folder that outlives nobody: one file, renewed while its holder runs.

A process of this machine that is gone is found out at once, whatever took its number since.  Of
another machine, only the file can be watched: where it is not renewed for as long as the lease
lasts, it is taken over.  No clocks of two machines are compared.

The file comes into being whole, by a hard link, which fails where there is one.  A stale one is
replaced by whoever holds the claim on it: a lock of the same kind, named after the stale one, so
that a dead claimant is replaced in its turn.  Who comes late finds another file and starts over.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp.errors import StorageError, UserError
from jaxdp.runtime.exclusive import created, put
from jaxdp.runtime.owner import Owner, is_alive, read_owner, this_process

NAME = "run.lock"
LEASE_S = 60.0  # longer than a machine stands still for, shorter than people wait
_BEATS = 6  # renewals in the time of a lease
_MAX_TIME = 2.0**33  # seconds since 1970
_SIZE = 512  # of the file: a renewal overwrites it whole, in place


def _silent(line: str) -> None: ...


class Held(NamedTuple):
    """What a lock's file says.

    Attributes:
      token: drawn by the holder; no two are alike.
      beat: grows with every renewal.
      since: seconds since 1970, by the holder's clock; only told.
      lease_s: seconds without a renewal after which it is stale.
      owner: None where the file is not whole, which it is not for a moment where there are no
        hard links.
    """

    token: str
    beat: int
    since: float
    lease_s: float
    owner: Owner | None


class Lease:
    """A lock that this process holds.

    Use as a context manager; leaving it gives the lock back.
    """

    def __init__(self, path: Path, lease_s: float = LEASE_S, tell: Callable[[str], None] = _silent):
        """Takes the lock `path`, and renews it in a thread.

        Args:
          path: of the file; its folder exists.
          lease_s: seconds without a renewal after which others may take it.
          tell: gets a line where a process of another machine has to be waited for.

        Raises:
          UserError: somebody else holds it.
          StorageError: the file cannot be written.
        """
        self.path, self._lease_s, self._owner = path, lease_s, this_process()
        self._token, self._beat, self._since = secrets.token_hex(8), 0, time.time()
        _take(path, self._record(), tell)
        _sweep(path)
        try:
            self._file = os.open(path, os.O_WRONLY)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        self._lost: str | None = None
        self._renewed = _clock()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run lock", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Ends the lease; others may take the lock."""
        self._ended.set()
        self._thread.join()
        with suppress(UserError, StorageError, OSError):  # then it goes stale
            if self._holds():
                self._remove()
        os.close(self._file)

    def _remove(self) -> None:
        # under a claim, so that nobody takes it between the look and the removal
        claim = _claim(self.path, self._token)
        _take(claim, self._record(), _silent)
        try:
            if self._holds():
                self.path.unlink()
        finally:
            claim.unlink(missing_ok=True)

    @property
    def lost(self) -> bool:
        """Whether the lock was found to be another's, or nobody's."""
        return self._lost is not None

    def check(self) -> None:
        """Returns if the lock is held at this moment.

        Raises:
          StorageError: it is not: another run may be writing.
        """
        self._renew()
        if self._lost is None and _clock() - self._renewed > self._lease_s:
            self._lost = f"could not be renewed for {self._lease_s:.0f} s"
        if self._lost is not None:
            raise StorageError(
                f"{self.path} {self._lost}; two runs must not write into one folder, so this one "
                "saves nothing more: end the other, and go on with --resume"
            )

    def _keep(self) -> None:
        while not self._ended.wait(self._lease_s / _BEATS):
            self._renew()

    def _renew(self) -> None:
        with self._lock:
            if self._lost is not None:
                return
            try:
                self._beat += 1
                # into the file that was opened: where another lies in its place, that one is spared
                os.pwrite(self._file, self._record(), 0)
                self._renewed = _clock()
            except OSError:
                pass  # a disk may be away for a while; `check` knows for how long
            with suppress(OSError):
                if not self._holds():
                    held = read_lock(self.path)
                    self._lost = f"is now held by {describe(held)}" if held else "was removed"

    def _holds(self) -> bool:
        """Whether the file that was opened is the one that others find."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _record(self) -> bytes:
        values = {
            "token": self._token,
            "beat": self._beat,
            "since": round(self._since, 1),
            "lease_s": self._lease_s,
            **self._owner._asdict(),
        }
        return json.dumps(values).ljust(_SIZE - 1).encode() + b"\n"


def read_lock(path: Path) -> Held | None:
    """Who holds a lock; None where nobody does.

    Raises:
      OSError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            text, status = file.read(4 * _SIZE), os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    try:
        values: dict[str, Any] = json.loads(text)
        held = Held(
            str(values["token"]), int(values["beat"]), float(values["since"]),
            float(values["lease_s"]), read_owner(values),
        )  # fmt: skip
        if held.token.isalnum() and 0 < held.since < _MAX_TIME and 0 < held.lease_s <= LEASE_S:
            return held
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    return Held(f"unreadable{status.st_ino}x{status.st_mtime_ns}", 0, 0.0, LEASE_S, None)


def check_free(path: Path) -> None:
    """Raises UserError if a process of this machine holds the lock; writes nothing."""
    with suppress(OSError):  # `Lease` says it better
        held = read_lock(path)
        if held is not None and held.owner is not None and is_alive(held.owner):
            raise _refused(path, held)


def describe(held: Held) -> str:
    """The holder in words: host, process, since when."""
    if held.owner is None:
        return "a process that left no name"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held.since))
    return f"process {held.owner.pid} on {held.owner.host} since {since}"


def _take(path: Path, record: bytes, tell: Callable[[str], None]) -> None:
    """Makes the file `path` with `record` in it, or puts it in the place of a stale one."""
    try:
        while not created(path, record):
            if (held := read_lock(path)) is None:
                if path.is_symlink():
                    raise StorageError(f"{path}: leads to no file; remove it")
                continue  # given back in between
            if not _stale(path, held, tell):
                raise _refused(path, held)
            claim = _claim(path, held.token)
            _take(claim, record, _silent)
            try:
                now = read_lock(path)
                if now is not None and now.token == held.token:
                    put(path, record)
                    return
            finally:
                claim.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def _stale(path: Path, held: Held, tell: Callable[[str], None]) -> bool:
    """Whether its holder is gone; waits for the time of a lease where that cannot be seen."""
    alive = None if held.owner is None else is_alive(held.owner)
    if alive is not None:
        return not alive
    tell(f"{path} is held by {describe(held)}; waiting up to {held.lease_s:.0f} s for a sign of it")
    ends = _clock() + held.lease_s
    while _clock() < ends:
        time.sleep(min(held.lease_s / 50, 0.5))
        now = read_lock(path)
        if now is None or now.token != held.token:
            return True  # another look will tell
        if now != held:
            return False
    return True


def _refused(path: Path, held: Held) -> UserError:
    owner = held.owner
    mine = owner is not None and is_alive(owner) and owner.pid == os.getpid()
    who = "a run of this very process" if mine else describe(held)
    return UserError(
        f"out: {path.parent} is in use by {who}; wait for it or end it, or choose another folder "
        "with --out"
    )


def _sweep(path: Path) -> None:
    """Removes what processes left that were killed while they took the lock, long ago."""
    with suppress(OSError):
        newest = path.stat().st_mtime
        for file in path.parent.glob(f"{NAME}.*"):
            if file.lstat().st_mtime < newest - 2 * LEASE_S:
                file.unlink()


def _claim(path: Path, token: str) -> Path:
    return path.with_name(f"{NAME}.claim-{token}")


def _clock() -> float:
    """Seconds that go on while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)

"""What the ranks write: whole lines with the rank before them, a file for each, nobody waits.

Two threads for each rank read its pipes, so that a rank never waits for the reader of our output;
one more thread writes, and where that reader is too slow, lines are left out and counted.  Lines
are shown a moment after they came: when a rank fails, what the others make of it in that moment can
then be held back, and the first thing that is shown is the failure itself.
"""

import contextlib
import errno
import os
import select
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, NamedTuple

from jaxdp.wording import counted

_DELAY_S = 0.3
_LONGEST = 1 << 16  # bytes of a line: a longer one is cut in pieces
_WAITING = 8 << 20  # bytes that wait for a slow reader
_TAIL = 200  # lines of a rank's error stream that are kept for the report of its failure
_PATIENCE_S = 10.0
OUT, ERR = 1, 2


class Lines:
    """Cuts what comes in pieces into lines.

    Of a line that a progress bar wrote over itself with carriage returns, the last state is kept,
    as on a terminal.

    >>> lines = Lines()
    >>> lines.feed(b"step 1\\nst"), lines.feed(b"ep 2\\r\\n10%\\r20%\\n"), lines.rest()
    ([b'step 1'], [b'step 2', b'20%'], [])
    """

    def __init__(self, longest: int = _LONGEST):
        self._open, self._longest = b"", longest

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that end in this piece."""
        *whole, self._open = (self._open + piece).split(b"\n")
        if len(self._open) > self._longest:
            last = _last_state(self._open)
            cut = len(last) // self._longest * self._longest
            whole += [last[i : i + self._longest] for i in range(0, cut, self._longest)]
            self._open = last[cut:]
        return [_last_state(line) for line in whole]

    def rest(self) -> list[bytes]:
        """The line that never ended, if there is one."""
        left, self._open = _last_state(self._open), b""
        return [left] if left else []


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _fill_descriptors() -> None:
    """Opens what our caller closed (`2>&-`): a pipe would get its number, and then our words."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


class _Waiting(NamedTuple):
    due: float
    stream: int
    line: bytes


class Output:
    """The launcher's two outputs.

    Attributes:
      reader_left: whether standard output is a pipe that nobody reads any more.
    """

    def __init__(self, delay_s: float = _DELAY_S):
        _fill_descriptors()
        self.reader_left = False
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._own: deque[_Waiting] = deque()  # of this launcher: shown at once, never left out
        self._theirs: deque[_Waiting] = deque()
        self._bytes = self._left_out = 0
        self._holding = self._closing = False
        self._held = 0
        self._broken: set[int] = set()
        self._moved = time.monotonic()
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self._writer.start()

    def say(self, text: str) -> None:
        """Shows words of the launcher itself, on the error stream."""
        with self._changed:
            lines = text.encode(errors="replace").split(b"\n")
            self._own.extend(_Waiting(0.0, ERR, line) for line in lines)
            self._changed.notify_all()

    def show(self, rank: int, stream: int, line: bytes) -> None:
        """Shows a line of a rank in a moment, unless it is held back or the reader is too slow."""
        with self._changed:
            if self._holding:
                self._held += 1
            elif self._bytes > _WAITING:
                self._left_out += 1
            else:
                due = time.monotonic() + self._delay_s
                self._theirs.append(_Waiting(due, stream, b"[%d] %s" % (rank, line)))
                self._bytes += len(self._theirs[-1].line)
                self._changed.notify_all()

    def hold(self) -> None:
        """Shows no more of the ranks' lines, nor those that came a moment ago."""
        with self._changed:
            self._holding = True
            now = time.monotonic()
            while self._theirs and self._theirs[-1].due > now:
                self._bytes -= len(self._theirs.pop().line)
                self._held += 1

    def release(self) -> int:
        """Shows lines again; returns how many were held back."""
        with self._changed:
            held, self._held, self._holding = self._held, 0, False
            return held

    def close(self) -> None:
        """Shows what waits, unless the reader takes nothing of it for ten seconds."""
        with self._changed:
            self._closing = True
            self._moved = time.monotonic()
            self._changed.notify_all()
        while self._writer.is_alive() and time.monotonic() - self._moved < _PATIENCE_S:
            self._writer.join(0.1)

    def _write_all(self) -> None:
        while (item := self._next()) is not None:
            self._write(item.stream, item.line + b"\n")

    def _next(self) -> _Waiting | None:
        """Waits for the next line that is due; None after the last."""
        with self._changed:
            while True:
                if self._own:
                    return self._own.popleft()
                now = time.monotonic()
                if self._left_out and self._bytes < _WAITING // 2:
                    words = f"launch: {counted(self._left_out, 'line')} left out here: the reader"
                    self._left_out = 0
                    return _Waiting(0.0, ERR, f"{words} of this output is too slow".encode())
                if self._theirs and (self._closing or self._theirs[0].due <= now):
                    item = self._theirs.popleft()
                    self._bytes -= len(item.line)
                    return item
                if self._closing:
                    return None
                self._changed.wait(self._theirs[0].due - now if self._theirs else None)

    def _write(self, stream: int, text: bytes) -> None:
        while text and stream not in self._broken:
            try:
                text = text[os.write(stream, text) :]
            except BlockingIOError:  # somebody made our terminal non-blocking
                select.select([], [stream], [], 1.0)
            except OSError as error:
                self._broken.add(stream)
                if error.errno == errno.EPIPE:
                    self.reader_left |= stream == OUT
                elif stream == OUT:
                    self.say(f"launch: standard output cannot be written: {error.strerror}")
            self._moved = time.monotonic()


class RankOutput:
    """Reads the two pipes of a rank.

    Args:
      output: where its lines are shown.
      rank: what stands before them.
      process: its pipes.
      path: a file that gets every line of both; None for none.
    """

    def __init__(
        self, output: Output, rank: int, process: subprocess.Popen[bytes], path: Path | None
    ):
        self._output, self._rank = output, rank
        self._tail: deque[bytes] = deque(maxlen=_TAIL)
        self._file_lock = threading.Lock()
        self._file = self._opened(path)
        self._threads = [
            threading.Thread(target=self._read, args=(pipe, stream), daemon=True)
            for pipe, stream in ((process.stdout, OUT), (process.stderr, ERR))
        ]
        for thread in self._threads:
            thread.start()

    def tail(self) -> str:
        """The last lines of its error stream."""
        return b"\n".join(self._tail.copy()).decode(errors="replace")

    def finish(self, within_s: float = 0.5) -> None:
        """Waits for the last lines of a process that has ended."""
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._file_lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _read(self, pipe: IO[bytes], stream: int) -> None:
        lines = Lines()
        with contextlib.suppress(OSError, ValueError), pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                self._take(lines.feed(piece), stream)
        self._take(lines.rest(), stream)

    def _take(self, lines: list[bytes], stream: int) -> None:
        for line in lines:
            if stream == ERR:
                self._tail.append(line)
            self._keep(line)
            self._output.show(self._rank, stream, line)

    def _opened(self, path: Path | None) -> IO[bytes] | None:
        try:
            return None if path is None else path.open("ab", buffering=0)
        except OSError as error:
            self._output.say(f"launch: {path}: cannot be written: {error.strerror}")
            return None

    def _keep(self, line: bytes) -> None:
        with self._file_lock:
            if self._file is None:
                return
            try:
                self._file.write(line + b"\n")
            except OSError as error:  # a full disk: the training goes on
                self._output.say(
                    f"launch: {self._file.name}: no more is written to it: {error.strerror}"
                )
                self._file.close()
                self._file = None

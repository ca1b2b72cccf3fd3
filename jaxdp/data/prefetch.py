"""Making the next batches in a background thread while the devices work on this one."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def prefetch(make: Callable[[int], T], start: int, stop: int, depth: int = 2) -> "Prefetch[T]":
    """Iterates over `(step, make(step))` for steps in `range(start, stop)`, made ahead of time.

        with prefetch(loader.batch, 0, 1000) as batches:
            for step, batch in batches: ...

    One thread makes the values in order, at most `depth` ahead of the consumer.  An exception of
    `make` is raised in the consumer in place of its value.  The thread ends with the last step, an
    exception, `close()`, the end of the `with` block, or when the iterator is no longer referenced.

    Args:
      make: step -> value; runs in the thread.
      start: first step.
      stop: one past the last step.
      depth: how many values may wait, >= 1.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}; expected >= 1")
    return Prefetch(make, range(start, stop), depth)


class Prefetch(Generic[T]):
    """The iterator that `prefetch` returns.

    Attributes:
      waited_s: seconds that the consumer has spent waiting for values.
    """

    def __init__(self, make: Callable[[int], T], steps: range, depth: int):
        self.waited_s = 0.0
        self._ready: SimpleQueue = SimpleQueue()
        self._slots: SimpleQueue = SimpleQueue()
        self._closed = threading.Event()
        self._done = False
        for _ in range(depth):
            self._slots.put(None)
        # The thread holds no reference to the iterator, or that could never be collected.  A daemon
        # as a last resort: a `make` that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=_work,
            args=(make, steps, self._slots, self._ready, self._closed),
            name="jaxdp-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> "Prefetch[T]":
        return self

    def __next__(self) -> tuple[int, T]:
        if self._done:
            raise StopIteration
        begin = time.perf_counter()
        step, value, error = self._ready.get()
        self.waited_s += time.perf_counter() - begin
        if step is None or error is not None:
            self.close()
            raise StopIteration if error is None else error
        self._slots.put(None)
        return step, value

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the thread and waits for it, at most `timeout_s` where `make` is still running."""
        self._done = True
        self._signal()
        self._thread.join(timeout_s)

    def _signal(self) -> None:
        self._closed.set()
        self._slots.put(None)  # wakes the thread where it waits for a free slot

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # No join: the collector may run this in the very thread that should end.
        if hasattr(self, "_thread"):
            self._signal()


def _work(
    make: Callable[[int], Any],
    steps: range,
    slots: SimpleQueue,
    ready: SimpleQueue,
    closed: threading.Event,
) -> None:
    """Puts (step, value, None) for each step; at the end (None, None, exception or None)."""
    # Two SimpleQueues, values one way and free slots the other: written in C, a few µs per value,
    # where a bounded queue.Queue takes a Python lock and two conditions for each.
    error: BaseException | None = None
    try:
        for step in steps:
            slots.get()
            if closed.is_set():
                return
            ready.put((step, make(step), None))
    except StopIteration as stop:
        # Raised from `__next__` as it is, it would end the training silently (PEP 479).
        error = RuntimeError("make(step) raised StopIteration")
        error.__cause__ = stop
    except BaseException as other:
        error = other
    finally:
        ready.put((None, None, error))

"""Asked to stop: by a signal, at a step that all processes of a job agree on.

In one process the first SIGINT or SIGTERM is noted, and asked for before every step.

In a job, SIGTERM at any process is what JAX calls a notice of preemption: its coordination service
passes it on to all, and they stop at the first step that none has begun.  JAX takes SIGTERM over
when the processes join, so there is no handler of ours for it; SIGINT and SIGHUP become a SIGTERM.
JAX looks for the notice once a second, in a thread of its own: one that comes while a step is
compiled, or during an evaluation or a save, is acted on before the next step.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_ALONE = (signal.SIGINT, signal.SIGTERM)
_JOINED = (signal.SIGINT, signal.SIGHUP)


class Stop(NamedTuple):
    """How a run learns that it shall stop.

    Attributes:
      at: step -> whether the run stops before it; asked before every step, with the steps so far.
        In a job all processes ask, and get the same answer.
      reason: who asked, in words.
    """

    at: Callable[[int], bool]
    reason: Callable[[], str]


@contextmanager
def stop_requests(processes: int) -> Iterator[Stop]:
    """Listens to the signals that ask a program to stop; of each, a second one acts as ever.

    Args:
      processes: of the job; they have joined.
    """
    received: list[signal.Signals] = []
    listened = _ALONE if processes == 1 else _JOINED
    before = {number: signal.getsignal(number) for number in listened}
    ignored = {n for n, handler in before.items() if handler is signal.SIG_IGN}  # under nohup

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        received.append(signal.Signals(number))
        restore()
        if processes > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    for number in before.keys() - ignored:
        signal.signal(number, note)
    try:
        if processes == 1:
            yield Stop(lambda step: bool(received), lambda: received[0].name)
        else:
            yield Stop(_agreed, lambda: "asked to stop")
    finally:
        restore()


def _agreed(step: int) -> bool:
    """Whether this is the step at which all processes stop."""
    from jax.experimental import multihost_utils  # only what has joined gets here

    # Orbax asks the same service when it saves, with the steps so far too: the numbers must agree
    return multihost_utils.reached_preemption_sync_point(step)

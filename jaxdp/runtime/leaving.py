"""The one way out of a job of several processes.

Success leaves together: a barrier, bounded, and JAX's own end.  Failure leaves at once, with a word
to the peers, a file for the launcher and one of the codes of `errors.Exit`: whoever waits for the
others in JAX's exit handlers waits for minutes, and is then aborted.

    own failure     its traceback, or its one line; its code
    a peer's        one line that names the peer; code 6, restart me
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from jaxdp.errors import (
    AgreedError,
    Ending,
    Exit,
    JaxdpError,
    PeerError,
    UserError,
    ending_of,
    exit_code,
)
from jaxdp.runtime.control import Failure, write_failure
from jaxdp.runtime.failures import first_line, is_of_peer, own_failure, peer_failure
from jaxdp.runtime.lifeline import Lifeline, Loss
from jaxdp.runtime.meeting import meet
from jaxdp.runtime.place import Place, place_of_this_process
from jaxdp.runtime.reports import Report

END_S = 60  # for all to come to the end, when one has
_REPORT_S = 5.0  # for all to hear of a mistake that was found before they met
_LIFELINE_S = 0.3  # for the lifeline, which knows the peer that a collective misses
_OWN_WORDS_S = 1.0  # for a peer that fails as all do to say it itself
_AFTERWARDS_S = 20.0  # for what other libraries do when Python ends
# codes of failures that all processes are likely to find in the same step
_COMMON = (Exit.USER, Exit.FAULT_FOUND, Exit.NUMERICS, Exit.STORAGE)


@dataclass
class _Job:
    """What this process knows of its job; one for the process, as JAX's runtime is.

    Attributes:
      met: whether the others are being met, or have been.
      place, lifeline: None before all are here.
      loss: the peer that left first.
    """

    met: bool = False
    place: Place | None = None
    lifeline: Lifeline | None = None
    loss: Loss | None = None


_job = _Job()
_ends = threading.Lock()  # taken by the thread that ends the process


def meets() -> None:
    """From now on the others need not be told of a mistake: they meet the same, or hear of it."""
    _job.met = True


def joined(place: Place, lifeline: Lifeline) -> None:
    """From now on the peers are told when this process leaves."""
    _job.place, _job.lifeline = place, lifeline


def run_worker(program: Callable[[Place | None], int]) -> int:
    """Runs a program; a process of a job ends as its job needs, any other as `exit_code` does.

    Args:
      program: gets this process's place, or None; returns its exit code.

    Returns:
      The exit code; a failing process of a job does not return.
    """
    places: list[Place | None] = []

    def find() -> int:
        places.append(place_of_this_process())
        return Exit.DONE

    if code := exit_code(find):
        return code
    [place] = places
    if place is None or (place.size == 1 and place.control is None):
        return exit_code(lambda: program(place))
    try:
        code = program(place)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException as error:
        ending = ending_of(error)
        if ending.code:
            _fail(place, error, ending)
        code = ending.code
    return _depart(place, code)


def peer_left(loss: Loss) -> None:
    """Ends this process, from whatever thread: a peer has left before the end."""
    _job.loss = loss
    if loss.code in _COMMON:
        time.sleep(_OWN_WORDS_S)
    assert _job.place is not None
    _end(_job.place, peer_failure(_job.place, str(loss)), _marked(_job.place, str(loss)))


def _fail(place: Place, error: BaseException, ending: Ending) -> NoReturn:
    if is_of_peer(error):
        if _job.lifeline is not None:
            time.sleep(_LIFELINE_S)
        line = str(error) if isinstance(error, PeerError) else first_line(error)
        line = str(_job.loss or line)
        _end(place, peer_failure(place, line), _marked(place, line))
    failure, text = own_failure(place, error, ending), ending.text
    if isinstance(error, UserError) and not _job.met and place.size > 1:
        error = _told_others(place, error)
        text = str(error)
    if getattr(error, "told_by_first", False):
        if place.rank:
            text = f"rank {place.rank} ends too, for the reason that rank 0 tells"
        _end(place, failure, text)
    _end(place, failure, _marked(place, text))


def _told_others(place: Place, mistake: UserError) -> UserError:
    """A mistake as all ranks know it, which did not have to wait for this one's then."""
    report = Report(place.rank, place.size, mistakes=tuple(mistake.lines))
    try:
        meet(place, report, _REPORT_S, lambda line: None)
    except AgreedError as agreed:
        return agreed
    except JaxdpError:  # they are not there, or cannot be found
        pass
    return mistake


def _end(place: Place, failure: Failure, text: str) -> NoReturn:
    """Tells whom it concerns, and ends the process at once."""
    if not _ends.acquire(blocking=False):  # by another thread, in a moment
        time.sleep(_AFTERWARDS_S)
    if _job.lifeline is not None:
        _job.lifeline.leave(failure.code, failure.message.partition("\n")[0])
    if place.control is not None:
        with contextlib.suppress(OSError):
            write_failure(place.control, failure)
    _say(text)
    if place.rank == 0 and _job.lifeline is not None and failure.code in _COMMON:
        # without rank 0's service JAX aborts the others before they have said theirs
        time.sleep(_OWN_WORDS_S + 0.5)
    os._exit(failure.code)


def _marked(place: Place, text: str) -> str:
    """With the rank before it, as a launcher does it anyway."""
    bare = not text or place.control is not None or place.size == 1
    return text if bare else f"rank {place.rank}: {text}"


def _say(text: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if text and stream is sys.stderr:
                print(text, file=stream)
            stream.flush()


def _depart(place: Place, code: int) -> int:
    """Leaves with the others, which have come to the end as well."""
    lifeline = _job.lifeline
    if lifeline is None:
        return code
    if (problem := _within(END_S, _shut_down)) is not None:
        line = str(_job.loss or f"the others did not come to the end: {problem}")
        _end(place, peer_failure(place, line), _marked(place, line))
    lifeline.leave(Exit.DONE)
    lifeline.close()
    _job.lifeline = None
    timer = threading.Timer(_AFTERWARDS_S, os._exit, [code])
    timer.daemon = True
    timer.start()
    return code


def _shut_down() -> None:
    import jax  # it is there: this process has joined
    from jax._src import distributed

    # Left to itself JAX first ends what listens to SIGTERM.  Where one has just come, that waits
    # for peers which no longer listen, or for a lock that it holds itself; once there is no
    # connection any more, it has nothing left to wait for.
    state = distributed.global_state
    listener, client = state.preemption_sync_manager, state.client
    state.preemption_sync_manager = None
    jax.distributed.shutdown()
    if listener is not None:
        listener.shutdown()
    del listener, client  # in this order: the first uses the second


def _within(seconds: float, do: Callable[[], None]) -> str | None:
    """What went wrong, where something did or it took longer."""
    problems: list[str] = [f"no end within {seconds:g} s"]

    def run() -> None:
        try:
            do()
            problems.clear()
        except Exception as error:
            problems[:] = [first_line(error)]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return problems[0] if problems else None

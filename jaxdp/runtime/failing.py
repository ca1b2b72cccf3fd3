"""How an attempt ended: which failure was the first, in words, and the exit code it comes to."""

import errno
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxdp.errors import Exit
from jaxdp.runtime.control import Failure
from jaxdp.runtime.requests import REQUESTS

_TAIL = 40  # lines of an error stream without a traceback in it
_LIMITS = {
    errno.EAGAIN: "processes or threads (ulimit -u, or the pids limit of the container)",
    errno.EMFILE: "open files (ulimit -n)",
    errno.ENFILE: "open files on this machine (sysctl fs.file-max)",
}


class Death(NamedTuple):
    """The end of a rank's process.

    Attributes:
      code: its exit code, or minus the signal's number.
      time: `time.time()` when it was seen.
      ours: whether this launcher had killed it.
    """

    rank: int
    code: int
    time: float
    ours: bool = False


class Told(NamedTuple):
    """The failure that ended an attempt.

    Attributes:
      rank, code: whose it is, and the exit code of law 9 that it comes to.
      line: what happened, in one line.
      details: a traceback, the last lines of an error stream, stacks; "" for none.
      phase, step: where the rank was, if it is known.
    """

    rank: int
    code: int
    line: str
    details: str
    phase: str | None
    step: int | None


def exit_status(code: int) -> int:
    """What a shell makes of a process's end: a signal's number counts from 128."""
    return 128 - code if code < 0 else code


def asked_to_end(code: int) -> int | None:
    """The signal by which a rank was asked to end, if that is what ended it."""
    return next((number for number in REQUESTS if exit_status(code) == 128 + number), None)


def is_failure(death: Death) -> bool:
    """Whether a rank failed by itself: it was not ended by us or on request, nor did it save."""
    return not (
        death.ours or death.code in (Exit.DONE, Exit.SAVED) or asked_to_end(death.code) is not None
    )


def first_failure(deaths: Sequence[Death], written: Mapping[int, Failure]) -> Death | None:
    """The failure that was the reason for the others.

    A rank that failed of itself comes before those that lost a peer; among them, the earliest by
    what they wrote, or by when they were seen to have ended.  What a rank wrote counts also if it
    was killed before it had left.
    """

    def order(death: Death) -> tuple[bool, float]:
        failure = written.get(death.rank)
        if failure is None:
            return death.code == Exit.PEER, death.time
        return failure.cause == "peer", failure.time

    def failed(death: Death) -> bool:
        failure = written.get(death.rank)
        return is_failure(death) or (failure is not None and asked_to_end(failure.code) is None)

    return min(filter(failed, deaths), key=order, default=None)


def tell(
    death: Death, written: Failure | None, tail: str, place: tuple[str | None, int | None]
) -> Told:
    """The first failure in words.

    Args:
      death: the end of the rank.
      written: what it wrote about its failure; None if it could not.
      tail: the last lines of its error stream.
      place: phase and step of its last heartbeat.
    """
    code = written.code if written else exit_status(death.code)
    if code == Exit.USER and (mistake := written.message if written else tail):
        return Told(death.rank, code, mistake.strip(), "", *place)
    if written is None:
        line = f"rank {death.rank} {_how(death.code)}{_where(*place)}"
        return Told(death.rank, code, line, _last_words(tail), *place)
    place = written.phase or None, written.step
    line = f"rank {death.rank} failed{_where(*place)}: {_reason(written)}"
    return Told(death.rank, code, line, written.traceback.rstrip("\n"), *place)


def not_started(rank: int, error: OSError | RuntimeError) -> Told:
    """A rank whose process, or the threads that read its lines, could not be had.

    A limit that stands in the way now does so again: the user has to raise it.  Another reason,
    such as no memory, may pass.
    """
    # a thread that cannot be started is a RuntimeError, which does not say why
    number = error.errno if isinstance(error, OSError) else errno.EAGAIN
    limit = _LIMITS.get(number or 0)
    if limit is None:
        why = getattr(error, "strerror", None) or str(error)
        return Told(rank, Exit.PEER, f"rank {rank} cannot be started: {why}", "", None, None)
    line = (
        f"rank {rank} cannot be started: too many {limit}; raise the limit, or start fewer with "
        "--nproc-per-node"
    )
    return Told(rank, Exit.USER, line, "", None, None)


def _last_words(tail: str) -> str:
    """Of the end of an error stream, the traceback and what follows, or the last lines."""
    _, mark, traceback = tail.partition("Traceback (most recent call last):")
    return mark + traceback if mark else "\n".join(tail.splitlines()[-_TAIL:])


def _reason(written: Failure) -> str:
    message = written.message.strip()
    first, _, more = message.partition("\n")
    words = first if not more or written.traceback else message
    return words if words.startswith(written.kind) else f"{written.kind}: {words}"


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (so does a system that runs out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _where(phase: str | None, step: int | None) -> str:
    if phase is None:
        return ""
    return f" in phase {phase}" + (f" at step {step}" if step is not None else "")


def outcome(deaths: Sequence[Death], told: Told | None, request: int | None, ranks: int) -> int:
    """The exit code of an attempt.

    Args:
      deaths: the ends of the ranks of this host that were started.
      told: the first failure, or who was stuck.
      request: the signal that asked the job to end.
      ranks: how many this host was to start; the job is done when all of them are.
    """
    if told is not None and (request is None or told.code != Exit.PEER):
        return told.code
    if any(death.code == Exit.SAVED for death in deaths):
        return Exit.SAVED
    done = sum(death.code == Exit.DONE for death in deaths)
    if request is not None and done < ranks:
        return 128 + request
    return Exit.DONE

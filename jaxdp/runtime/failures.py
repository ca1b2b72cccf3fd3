"""What an error that ends a process of a job means: whose failure, which code, which words."""

import os
import re
import socket
import time
import traceback
from collections.abc import Iterator

from jaxdp.errors import Ending, Exit, PeerError
from jaxdp.runtime.control import Failure, read_heartbeat
from jaxdp.runtime.phases import START
from jaxdp.runtime.place import Place

# of what Gloo, JAX's coordination service and NCCL say where a peer is gone
_PEER_IS_GONE = re.compile(
    r"Gloo .*(closed by peer|reset by peer|Broken pipe|[Tt]imed out|Connection refused)"
    r"|[Cc]oordination ?[Ss]ervice|[Hh]eartbeat timeout|another task|tasks have crashed"
    r"|Barrier (failed|timed out)"
    r"|NCCL.*(remote process exited|[Cc]onnection closed|remote error)",
    re.DOTALL,
)
_MOST_CAUSES = 10


def is_of_peer(error: BaseException) -> bool:
    """Whether the error says that another process is gone.

    JAX raises such as RuntimeError, and from some functions as ValueError; a library may have
    caught it and raised its own.
    """
    return any(
        isinstance(cause, PeerError)
        or (isinstance(cause, RuntimeError | ValueError) and _PEER_IS_GONE.search(str(cause)))
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def first_line(error: BaseException) -> str:
    """The class and the first line of the message, for those who did not raise it."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def own_failure(place: Place, error: BaseException, ending: Ending) -> Failure:
    """Of this process itself."""
    unexpected = ending.code == Exit.BUG
    stopped = isinstance(error, KeyboardInterrupt)
    return _failure(
        place,
        code=ending.code,
        kind="signal" if stopped else type(error).__name__,
        message=first_line(error) if unexpected else ending.text,
        traceback="".join(traceback.format_exception(error)) if unexpected else "",
        cause="own",
    )


def peer_failure(place: Place, message: str) -> Failure:
    """Of this process, because another one is gone."""
    return _failure(
        place, code=Exit.PEER, kind="PeerError", message=message, traceback="", cause="peer"
    )


def _failure(place: Place, **values: object) -> Failure:
    heartbeat = read_heartbeat(place.control, place.rank) if place.control else None
    return Failure(
        rank=place.rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        phase=heartbeat.phase if heartbeat else START,
        step=heartbeat.step if heartbeat else 0,
        time=time.time(),
        **values,  # type: ignore[arg-type]
    )

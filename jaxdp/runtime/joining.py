"""A process joins its job: everything between knowing its place and JAX's first device."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping

from jaxdp.errors import PeerError, UserError
from jaxdp.runtime import leaving
from jaxdp.runtime.gloo import use_address
from jaxdp.runtime.lifeline import Lifeline
from jaxdp.runtime.meeting import Meeting, meet
from jaxdp.runtime.place import CORES, Place
from jaxdp.runtime.preflight import Endpoint, join_address, versions
from jaxdp.runtime.reports import Report
from jaxdp.runtime.streams import hide_native_output

# JAX's notice of a dead process, for what the lifeline cannot see: long enough for a process that
# was stopped for seconds, or did not get a core
HEARTBEAT_S = 30
_INIT_S = 60  # all are there and have reported
_RETRY_S = 0.05
_NO_PROXY = "no_grpc_proxy"

Tell = Callable[[str], None]


def tell(line: str) -> None:
    """A line on the error stream, at once."""
    print(line, file=sys.stderr, flush=True)


def join(place: Place, config: Mapping[str, str] | None = None, tell: Tell = tell) -> None:
    """Makes this process one of its job, before JAX starts.

    Checks what can be checked, reports to rank 0, waits until all are there and want the same, and
    starts JAX's distributed runtime.  From then on a peer's death ends this process with code 6.

    Args:
      place: of this process; one of size 1 only gets its cores.
      config: key -> value of what all processes must agree on.
      tell: is given lines while it waits.

    Raises:
      UserError: the processes cannot find each other, or differ, or one of them has a mistake.
      PeerError: processes are missing.
    """
    _pin(place.cores)
    if place.size == 1:
        return
    leaving.meets()
    report = Report(place.rank, place.size, versions=versions(), config=config or {})
    meeting = meet(place, report, place.timeout_s, tell)
    leaving.joined(place, Lifeline(place.rank, meeting.roll, leaving.peer_left))
    _start_jax(place, meeting, tell)


def _start_jax(place: Place, meeting: Meeting, tell: Tell) -> None:
    hide_native_output()  # before what writes it is loaded
    import jax  # its import takes a second: mistakes are found before

    endpoint, bound, roll = meeting
    _bypass_proxies(endpoint.host)
    if place.rank:
        _await_coordinator(endpoint)
    use_address(roll.ip, len(set(roll.hosts)) > 1, tell)
    jax.distributed.initialize(
        str(endpoint),
        place.size,
        place.rank,
        None if place.device is None else [place.device],
        cluster_detection_method="deactivate",  # the place is known
        coordinator_bind_address=None if bound is None else join_address(bound, endpoint.port),
        initialization_timeout=_INIT_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=2 * leaving.END_S,  # `leaving` gives up before
    )


def _await_coordinator(endpoint: Endpoint) -> None:
    """Until JAX listens at rank 0: refused once, its client would look again after a second."""
    deadline = time.monotonic() + _INIT_S
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((endpoint.host, endpoint.port), timeout=_RETRY_S * 10),
        ):
            return
        time.sleep(_RETRY_S)
    raise PeerError(f"JAX did not start to listen at rank 0 ({endpoint}) within {_INIT_S} s")


def _bypass_proxies(host: str) -> None:
    """gRPC would ask a web proxy for the way to rank 0; JAX warns that it may hang there."""
    import jax

    if any("_proxy" in name.lower() for name in os.environ):
        # gRPC reads the names in small letters
        before = os.environ.get(_NO_PROXY) or os.environ.get("no_proxy")
        os.environ[_NO_PROXY] = f"{before},{host}" if before else host
        with contextlib.suppress(AttributeError):  # not in every version
            jax.config.update("jax_check_proxy_envs", False)


def _pin(cores: tuple[int, ...]) -> None:
    """XLA sizes its thread pool by the cores it may use: two pools on all cores fight."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, AttributeError) as error:
        raise UserError(
            f"{CORES}={','.join(map(str, cores))}: this process cannot be kept to these cores: "
            f"{error}"
        ) from error

"""How the processes of a job find each other: the checks, then the roll call."""

import ipaddress
from collections.abc import Callable
from typing import NamedTuple

from jaxdp.runtime.place import Place
from jaxdp.runtime.preflight import Endpoint, check_place, listen
from jaxdp.runtime.reports import Report
from jaxdp.runtime.rollcall import Roll, answer_roll, hold_roll


class Meeting(NamedTuple):
    """All are here and want the same.

    Attributes:
      endpoint: where rank 0 is reached from here.
      bound: rank 0 alone: the address that it listened on.
      roll: who they are, and open connections.
    """

    endpoint: Endpoint
    bound: str | None
    roll: Roll


def meet(place: Place, report: Report, timeout_s: float, tell: Callable[[str], None]) -> Meeting:
    """Waits for all processes of the job.

    Raises:
      UserError: the processes cannot find each other, or differ, or one of them has a mistake.
      PeerError: processes are missing.
    """
    endpoint = check_place(place, tell)
    if place.rank:
        return Meeting(endpoint, None, answer_roll(endpoint, report, timeout_s, tell))
    server = listen(place, endpoint)
    bound = str(server.getsockname()[0])
    roll = hold_roll(server, report, timeout_s, tell)
    if not ipaddress.ip_address(bound).is_unspecified:
        # at this it reaches itself too, whatever the name stands for on its own host
        endpoint = endpoint._replace(host=bound, ip=bound)
    return Meeting(endpoint, bound, roll)

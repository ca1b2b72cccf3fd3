"""What processes have to agree on around a checkpoint.  With one process, nothing is sent."""

from collections.abc import Callable
from typing import TypeVar

from jaxdp import peers
from jaxdp.errors import StorageError

T = TypeVar("T")


def of_the_first(value: int) -> int:
    """What process 0 gave; all have to call this."""
    return peers.from_first(lambda: value)


def any_process(flag: bool) -> bool:
    """Whether one of the processes said so; all have to call this."""
    return any(peers.from_all(flag))


def the_first_does(work: Callable[[], T], otherwise: T) -> T:
    """Process 0 does something and the others wait for it; all have to call this.

    Args:
      work: what it does.
      otherwise: what the others get.

    Raises:
      StorageError: on all processes, where it raised one.
    """
    failure, result = None, otherwise
    if peers.is_first():
        try:
            result = work()
        except StorageError as error:
            failure = error
    if any_process(failure is not None):
        raise failure or StorageError("checkpoints: process 0 failed, and says why")
    return result

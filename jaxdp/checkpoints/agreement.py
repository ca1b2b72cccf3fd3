"""What processes have to agree on around a checkpoint.  With one process, nothing is sent."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdp.errors import StorageError

T = TypeVar("T")


def of_the_first(value: int) -> int:
    """What process 0 gave; all have to call this."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def any_process(flag: bool) -> bool:
    """Whether one of the processes said so; all have to call this."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.bool_(flag)).any())


def the_first_does(work: Callable[[], T], otherwise: T) -> T:
    """Process 0 does something and the others wait for it; all have to call this.

    Args:
      work: what it does.
      otherwise: what the others get.

    Raises:
      StorageError: on all processes, where it raised one.
    """
    failure, result = None, otherwise
    if jax.process_index() == 0:
        try:
            result = work()
        except StorageError as error:
            failure = error
    if any_process(failure is not None):
        raise failure or StorageError("checkpoints: process 0 failed, and says why")
    return result

"""What processes have to agree on around a checkpoint.  With one process, nothing is sent."""

import jax
import numpy as np
from jax.experimental import multihost_utils


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

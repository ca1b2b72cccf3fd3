"""Logical shards: a global batch cut the same way whatever the number of devices.

With S shards on n devices, device d computes shards d * S/n to (d + 1) * S/n, one a turn:

    S = 8        turn 0    turn 1    turn 2    turn 3
    n = 2    0:  shard 0         1         2         3
             1:  shard 4         5         6         7
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp.errors import UserError
from jaxdp.sizes import is_power_of_two, powers_of_two
from jaxdp.types import Batch


class Shards(NamedTuple):
    """What the devices compute in one turn; on a device, the leading dim is 1.

    Attributes:
      number: int32 `[n]`, which logical shard each device has.
      examples: leaves `[n, microbatches, b, ...]`.
    """

    number: Any
    examples: Batch


def by_turns(
    batch: Batch, shards: int, devices: int, own: Sequence[int] | None = None
) -> tuple[Shards, ...]:
    """What devices compute, turn by turn.

    Args:
      batch: NumPy arrays `[microbatches, own shards * b, ...]`.
      shards: S, over all devices.
      devices: n.
      own: the numbers of the devices that `batch` is for; all by default.
    """
    turns = shards // devices
    numbers = np.arange(shards, dtype=np.int32).reshape(devices, turns)
    numbers = numbers if own is None else numbers[list(own)]

    def of_turn(x: np.ndarray, turn: int) -> np.ndarray:
        cut = x.reshape(len(x), len(numbers), turns, -1, *x.shape[2:])
        return np.ascontiguousarray(np.moveaxis(cut[:, :, turn], 0, 1))

    return tuple(
        Shards(
            np.ascontiguousarray(numbers[:, turn]), {k: of_turn(x, turn) for k, x in batch.items()}
        )
        for turn in range(turns)
    )


def check_shards(shards: int, devices: int) -> None:
    """Raises UserError if `shards` is no power of two, or cannot be spread over the devices."""
    if shards < 1 or not is_power_of_two(shards):
        raise UserError(f"logical_shards: {shards}; expected a power of two, such as 8")
    if devices not in powers_of_two(shards):
        valid = ", ".join(map(str, powers_of_two(shards)))
        raise UserError(
            f"logical_shards: {shards} on {devices} devices; expected one of {valid} devices"
        )

"""A schedule run in NumPy, rank by rank and chunk by chunk: for tests, notebooks and drawing."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxdp.collectives.ops import get_op
from jaxdp.collectives.schedule import Schedule


def simulate(schedule: Schedule, inputs: Sequence[np.ndarray], op: str = "sum") -> list[np.ndarray]:
    """What every rank ends with.

    Args:
      schedule: a collective over n ranks.
      inputs: one array per rank, all of one shape and dtype.  all_reduce and broadcast
        take any shape; reduce_scatter `[n * k, ...]`, all_gather `[k, ...]`.
      op: name of the reduction.

    Returns:
      One array per rank, shaped as `jaxdp.collectives.all_reduce` and its sisters shape it.
    """
    states = list(trace(schedule, inputs, op))
    return [_join(schedule, rank, chunks, inputs[rank]) for rank, chunks in enumerate(states[-1])]


def trace(
    schedule: Schedule, inputs: Sequence[np.ndarray], op: str = "sum"
) -> Iterator[list[list[np.ndarray]]]:
    """The chunks `[rank][chunk]` before the first round and after each round."""
    combine = get_op(op).numpy
    held = [_split(schedule, rank, x, op) for rank, x in enumerate(inputs)]
    yield held
    for transfers in schedule.rounds:
        before, held = held, [list(row) for row in held]
        for transfer in transfers:
            for (source, destination), sent in zip(transfer.pairs, transfer.chunks, strict=True):
                for chunk in sent:
                    arrived = before[source][chunk]
                    own = before[destination][chunk]
                    held[destination][chunk] = combine(own, arrived) if transfer.reduce else arrived
        yield held


def _split(schedule: Schedule, rank: int, x: np.ndarray, op: str) -> list[np.ndarray]:
    parts = x.reshape(schedule.parts[0], x.size // schedule.parts[0])
    padding = -parts.shape[1] % schedule.grain
    parts = np.pad(parts, ((0, 0), (0, padding)), constant_values=get_op(op).identity(x.dtype))
    if schedule.result != "all_gather":
        return np.split(parts.reshape(-1), schedule.chunks)
    own = np.split(parts.reshape(-1), schedule.grain)
    first = schedule.owned(rank)[0]
    blank = np.zeros_like(own[0])
    return [own[c - first] if c in schedule.owned(rank) else blank for c in range(schedule.chunks)]


def _join(schedule: Schedule, rank: int, chunks: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    if schedule.result == "reduce_scatter":
        chunks = [chunks[c] for c in schedule.owned(rank)]
    given, made = schedule.parts
    parts = np.concatenate(chunks).reshape(made, -1)[:, : x.size // given]
    rows = x.shape[0] * made // given if x.ndim else 1
    return parts.reshape((rows, *x.shape[1:]) if x.ndim else ())

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
    if schedule.result == "all_gather":
        own = np.split(x.reshape(-1), len(schedule.owned(rank)))
        blank = [np.zeros_like(own[0])] * schedule.chunks
        return [
            own[c - schedule.owned(rank)[0]] if c in schedule.owned(rank) else blank[c]
            for c in range(schedule.chunks)
        ]
    padding = np.full(-x.size % schedule.chunks, get_op(op).identity(x.dtype), x.dtype)
    return np.split(np.concatenate([x.reshape(-1), padding]), schedule.chunks)


def _join(schedule: Schedule, rank: int, chunks: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    if schedule.result == "reduce_scatter":
        mine = np.concatenate([chunks[c] for c in schedule.owned(rank)])
        return mine.reshape(x.shape[0] // schedule.n, *x.shape[1:])
    flat = np.concatenate(chunks)
    if schedule.result == "all_gather":
        return flat.reshape(x.shape[0] * schedule.n, *x.shape[1:])
    return flat[: x.size].reshape(x.shape)

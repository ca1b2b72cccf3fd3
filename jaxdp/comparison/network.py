"""The network model, fitted: alpha and beta from single permutations, gamma from a local add.

No time of an algorithm enters the fit, so that what it predicts for them is a prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxdp.collectives import Links, algorithms_for, make_schedule, predict_s
from jaxdp.comparison.cases import DTYPES, Case
from jaxdp.comparison.timing import add_time, permute_times
from jaxdp.errors import UserError

_CHAINED = 8


@dataclass(frozen=True)
class Network:
    """The fitted model: a program takes `start_s`, and then what its schedule takes on `links`."""

    start_s: float
    links: Links


def measure_network(mesh: Mesh, sizes: Sequence[int], iters: int) -> Network:
    """Fits the model on `mesh`, with messages of the given bytes.

    A program of one permutation and one of nine differ by eight messages; what is left of the
    first is the time to start a program.
    """
    chains = [
        [permute_times(mesh, nbytes, permutes, iters, calls=4) for permutes in (1, 1 + _CHAINED)]
        for nbytes in sizes
    ]
    messages = [max(nine - one, 1e-9) / _CHAINED for one, nine in chains]
    alpha, beta = fit_line(sizes, messages)
    starts = [one - message for (one, _), message in zip(chains, messages, strict=True)]
    largest = max(sizes)
    gamma = add_time(largest, iters) / largest
    return Network(max(0.0, min(starts)), Links(alpha, beta, gamma))


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """alpha + beta * bytes through times, by least squares of the *relative* error.

    Absolute errors would let the largest message decide and leave alpha to chance.

    Args:
      sizes: bytes, at least two different.
      times: seconds, positive.

    Returns:
      (alpha in seconds, beta in seconds per byte), neither negative.
    """
    nbytes, seconds = np.asarray(sizes, float), np.asarray(times, float)
    matrix = np.stack([1 / seconds, nbytes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, np.linalg.lstsq(matrix[:, 1:], np.ones(len(seconds)), rcond=None)[0][0]
    if beta < 0:
        alpha, beta = np.linalg.lstsq(matrix[:, :1], np.ones(len(seconds)), rcond=None)[0][0], 0.0
    return float(alpha), float(beta)


def predict(case: Case, n: int, network: Network) -> float | None:
    """Seconds of a case in the model; None where it has no schedule to be priced."""
    if case.algorithm not in algorithms_for(case.op, scheduled=True):
        return None
    try:
        schedule = make_schedule(case.algorithm, case.op, n)
    except UserError:
        return None
    size = DTYPES[case.dtype].itemsize
    scale = n if case.op == "all_gather" else 1
    return network.start_s + sum(
        predict_s(schedule, count * size * scale, network.links, itemsize=size)
        for count in case.sizes
    )

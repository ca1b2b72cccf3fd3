"""A comparison as people read it: nccl-tests' table, and what follows from it."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from jaxdp.comparison.network import Network
from jaxdp.comparison.run import Comparison, Row
from jaxdp.wording import counted, emulated_devices

COLUMNS = (
    f"{'bytes':>11} {'count':>10} {'type':>8} {'redop':>7}  {'algorithm':<20}"
    f"{'time us':>10} {'p99 us':>10} {'model us':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>7}"
)
UNITS = "bandwidths in GB/s (1e9 bytes); time: median of the samples"


def line(row: Row) -> str:
    """One row."""
    model = "-" if row["predicted_us"] is None else f"{row['predicted_us']:.1f}"
    return (
        f"{row['bytes']:>11} {row['count']:>10} {row['dtype']:>8} {row['redop']:>7}  "
        f"{row['algorithm']:<20}{row['time_us']:>10.1f} {row['time_us_p99']:>10.1f} {model:>10} "
        f"{row['algbw_gbps']:>8.3f} {row['busbw_gbps']:>8.3f} {row['wrong']:>7}"
    )


def footer(comparison: Comparison) -> Iterator[str]:
    """Best algorithm per size, crossovers, averages, the model and its error."""
    if comparison.facts.get("devices") == 1:
        yield "one device sends nothing: no algorithm is better than another"
    else:
        yield from _best_lines(comparison)
    busbw = np.mean([row["busbw_gbps"] for row in comparison.rows])
    yield f"average busbw: {busbw:.3f} GB/s"
    if comparison.network is not None:
        yield from model_lines(comparison.network, comparison.rows)
    yield f"out of bounds values: {comparison.wrong} {'OK' if not comparison.wrong else 'FAILED'}"


def _best_lines(comparison: Comparison) -> Iterator[str]:
    best = best_per_size(comparison.rows)
    for size, row in best.items():
        against = _time_of(comparison.rows, "psum", size)
        gain = f", {against / row['time_us']:.2f} times psum's speed" if against else ""
        yield f"best at {_words(size)}: {row['algorithm']} ({row['time_us']:.1f} us{gain})"
    for one, other in crossovers(comparison.rows):
        yield (
            f"crossover between {_words(size_of(one))} and {_words(size_of(other))}: "
            f"{one['algorithm']} -> {other['algorithm']}"
        )


def model_lines(network: Network, rows: list[Row]) -> Iterator[str]:
    """The fitted network, and how far its predictions are from times that it was not fitted to."""
    links = network.links
    rate = f"{1 / links.beta / 1e9:.3f} GB/s" if links.beta else "unlimited"
    yield (
        f"model: start {network.start_s * 1e6:.1f} us, alpha {links.alpha * 1e6:.1f} us, "
        f"beta {links.beta * 1e9:.3f} ns/byte ({rate}), gamma {links.gamma * 1e9:.3f} ns/byte, "
        "fitted to permutations and a local add"
    )
    if (error := model_error(rows)) is not None:
        yield (
            f"model against {error[0]} measured rows that were not fitted: off by a factor of "
            f"{error[1]:.2f} (median), {error[2]:.2f} (worst)"
        )


def model_error(rows: list[Row]) -> tuple[int, float, float] | None:
    """(rows with a prediction, median and worst factor by which it is off); None without any."""
    ratios = [row["time_us"] / row["predicted_us"] for row in rows if row["predicted_us"]]
    if not ratios:
        return None
    factors = np.exp(np.abs(np.log(ratios)))
    return len(ratios), float(np.median(factors)), float(np.max(factors))


Size = tuple[int, int]  # bytes, and in how many arrays they are sent


def size_of(row: Row) -> Size:
    """What distinguishes the sizes of a sweep."""
    return row["bytes"], -row["arrays"]


def average_bytes(row: Row) -> float:
    """Bytes of a row's arrays: the buckets of one model have one sum and several sizes."""
    return row["bytes"] / row["arrays"]


def _words(size: Size) -> str:
    return f"{size[0]} bytes" + (f" in {-size[1]} arrays" if size[1] < -1 else "")


def best_per_size(rows: list[Row]) -> dict[Size, Row]:
    """The fastest row of each size, smallest first; wrong ones do not count."""
    best: dict[Size, Row] = {}
    for row in sorted(rows, key=lambda row: (size_of(row), row["time_us"])):
        if not row["wrong"]:
            best.setdefault(size_of(row), row)
    return best


def crossovers(rows: list[Row]) -> list[tuple[Row, Row]]:
    """The best rows before and after each change of the best algorithm."""
    best = list(best_per_size(rows).values())
    return [(one, other) for one, other in pairwise(best) if one["algorithm"] != other["algorithm"]]


def _time_of(rows: list[Row], algorithm: str, size: Size) -> float | None:
    found = [
        row["time_us"] for row in rows if (row["algorithm"], size_of(row)) == (algorithm, size)
    ]
    return found[0] if found else None


def facts_line(facts: dict[str, Any]) -> str:
    """Where it was measured."""
    if facts["platform"] != "cpu":
        where = (
            f"{facts['devices']} x {facts['device_kind']}, {counted(facts['processes'], 'process')}"
        )
    elif facts["processes"] > 1:
        where = (
            f"{facts['processes']} processes on one machine over loopback (Gloo), "
            f"{facts['devices']} devices: not a network"
        )
    elif facts["devices"] > 1:
        where = emulated_devices(facts["devices"])
    else:
        where = "1 CPU device"
    return (
        f"{where}; jax {facts['jax']}, jaxlib {facts['jaxlib']}, Python {facts['python']}, "
        f"{facts['cpus']} cores, load {facts['load']}"
    )

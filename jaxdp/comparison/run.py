"""The whole comparison, as a function for notebooks and for `python -m jaxdp.compare`."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxdp.collectives import algorithms_for, make_schedule
from jaxdp.collectives.schedule import Result
from jaxdp.collectives.tuning import Choice
from jaxdp.comparison.cases import (
    Case,
    bus_factor,
    elements,
    payload_bytes,
    shown_count,
)
from jaxdp.comparison.network import Network, measure_network, predict
from jaxdp.comparison.timing import (
    Measured,
    count_wrong,
    place_inputs,
    prepare,
    time_in_turns,
    warm_up,
)
from jaxdp.errors import UserError
from jaxdp.mesh import data_mesh

Row = dict[str, Any]
_FIT_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
      rows: one per algorithm and size, with nccl-tests' names: op, redop, algorithm, bytes, count,
        dtype, time_us (median), time_us_p99, algbw_gbps, busbw_gbps, wrong; besides them
        predicted_us (None without a schedule), compile_s, samples_us.
      network: the fitted model; None if the fit was left out.
      facts: of the machine and the run.
      seconds: what it took.
    """

    rows: list[Row]
    network: Network | None
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def wrong(self) -> int:
        """Wrong elements in all rows."""
        return sum(row["wrong"] for row in self.rows)


def run_compare(
    devices: Sequence[Any] | None = None,
    *,
    op: Result = "all_reduce",
    algorithms: Sequence[str] | None = None,
    dtype: str = "float32",
    redop: str = "sum",
    sizes: Sequence[int] = (1 << 10, 1 << 14, 1 << 18, 1 << 22),
    buckets: Sequence[tuple[int, ...]] | None = None,
    iters: int = 20,
    warmup: int = 3,
    latency: bool = False,
    fit: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Comparison:
    """Checks and times algorithms side by side.

    Args:
      devices: of all processes; None: all there are.
      op: the collective.
      algorithms: rows of the table; None: all that exist for this collective and number of ranks.
      dtype: of the elements.
      redop: "sum", "max", "min" or "product".
      sizes: bytes, as nccl-tests counts them.
      buckets: instead of `sizes`, the elements of several arrays that are sent one after the other.
      iters, warmup: samples of each case, and calls before them.
      latency: time single calls instead of calls back to back.
      fit: whether to fit the network model.
      seed: of the inputs.
      progress: told what is being done.
      on_row: gets each row as soon as it is measured.

    Raises:
      UserError: an algorithm that is not there, or not for this collective or number of ranks.
    """
    started, load = time.perf_counter(), os.getloadavg()[0]  # before our own
    mesh = data_mesh(devices or jax.devices())
    chosen = check_algorithms(op, algorithms, mesh.size)
    counts = buckets or [(elements(op, nbytes, dtype, mesh.size),) for nbytes in sizes]
    sweep: list[list[Measured]] = []
    for number, arrays in enumerate(counts):
        cases = [Case(op, redop, algorithm, dtype, tuple(arrays)) for algorithm in chosen]
        where = f"size {number + 1} of {len(counts)}"
        sweep.append(_checked(cases, mesh, seed, lambda text, at=where: progress(f"{text}, {at}")))
    progress("warming up")
    for measured in sweep:
        warm_up(measured, warmup)
    network = None
    if fit and mesh.size > 1:
        progress("fitting alpha, beta and gamma")
        network = measure_network(mesh, _FIT_BYTES, iters)
    rows: list[Row] = []
    for number, measured in enumerate(sweep):
        progress(f"timing {len(chosen)} algorithms in turns, size {number + 1} of {len(sweep)}")
        time_in_turns(measured, mesh, iters=iters, latency=latency)
        for one in measured:
            rows.append(_row(one, mesh.size, network))
            on_row(rows[-1])
    return Comparison(rows, network, _facts(mesh, load), time.perf_counter() - started)


def _checked(
    cases: Sequence[Case], mesh: Mesh, seed: int, progress: Callable[[str], None]
) -> list[Measured]:
    """Cases of one size compiled, their results counted against NumPy's."""
    inputs, found = place_inputs(cases[0], mesh, seed), []
    for case in cases:
        progress(f"compiling and checking {case.algorithm}")
        found.append(prepare(case, mesh, inputs))
        found[-1].wrong = count_wrong(found[-1], mesh, seed + 1)
    return found


def _facts(mesh: Mesh, load: float) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": mesh.size,
        "processes": jax.process_count(),
        "emulated": device.platform == "cpu" and mesh.size > jax.process_count(),
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "cpus": os.cpu_count(),
        "load": round(load, 2),
    }


def check_algorithms(op: Result, names: Sequence[str] | None, n: int) -> list[str]:
    """The algorithms that are asked for, or all that exist.

    Raises:
      UserError: one line per name that cannot run.
    """
    known = algorithms_for(op)
    if names is None:
        return [name for name in known if _missing(op, name, n) is None]
    if op == "all_reduce":
        known = [*known, "auto"]
    lines = [
        f"algorithms: {name} is not known for {op}; expected some of {', '.join(known)}"
        for name in names
        if name not in known
    ]
    lines += [
        f"algorithms: {why}" for name in names if name in known and (why := _missing(op, name, n))
    ]
    if lines:
        raise UserError(*lines)
    return list(dict.fromkeys(names))


def _missing(op: Result, name: str, n: int) -> str | None:
    """Why an algorithm does not exist for n ranks; None if it does."""
    if name not in algorithms_for(op, scheduled=True):
        return None
    try:
        make_schedule(name, op, n)
    except UserError as error:
        return str(error)
    return None


def _row(measured: Measured, n: int, network: Network | None) -> Row:
    case = measured.case
    predicted_s = predict(case, n, network) if network else None
    samples = np.asarray(measured.times_s) * 1e6
    median = float(np.median(samples))
    nbytes = payload_bytes(case, n)
    algbw = nbytes / median / 1e3  # bytes per µs are MB/s
    return {
        "op": case.op,
        "redop": case.redop if case.op in ("all_reduce", "reduce_scatter") else "none",
        "algorithm": case.algorithm,
        "bytes": nbytes,
        "count": shown_count(case, n),
        "dtype": case.dtype,
        "time_us": median,
        "time_us_p99": float(np.percentile(samples, 99)),
        "algbw_gbps": algbw,
        "busbw_gbps": algbw * bus_factor(case.op, n),
        "wrong": measured.wrong,
        "predicted_us": predicted_s and predicted_s * 1e6,
        "compile_s": measured.compile_s,
        "samples_us": [round(float(x), 3) for x in samples],
        "arrays": len(case.sizes),
    }


def fastest(devices: Sequence[Any], nbytes: int) -> Choice:
    """Measures for a few seconds which all-reduce of `nbytes` is the fastest on `devices`.

    Process 0 decides for all: times differ between processes, and so could their choices.
    """
    found = run_compare(devices, sizes=(nbytes,), iters=5, warmup=1, fit=False)
    names = [row["algorithm"] for row in found.rows]
    times = [row["time_us"] if not row["wrong"] else np.inf for row in found.rows]
    best = int(np.argmin(times))
    if jax.process_count() > 1:
        best = int(multihost_utils.broadcast_one_to_all(np.int32(best)))
    return Choice(
        names[best],
        f"the fastest of {len(names)} measured at the start, {times[best]:.0f} us "
        f"(psum {times[names.index('psum')]:.0f} us)",
    )

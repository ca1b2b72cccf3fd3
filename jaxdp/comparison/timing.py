"""Checks and times compiled collectives.

Correctness is a pass of its own, on fresh inputs.  Times are taken back to back with one wait at
the end, as a training loop would; algorithms take turns, so that a drift of the machine hits all
alike; no sample is thrown away.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.comparison.cases import Case, body, expected, payload_bytes, random_input
from jaxdp.mesh import AXIS, on_mesh

_SAMPLE_BYTES = 4 << 20  # calls of one sample move about this much, so that small ones are timeable
_MAX_CALLS = 32
_IN_FLIGHT = 2


@dataclass
class Measured:
    """A case, compiled, with what was found."""

    case: Case
    run: Any  # the compiled program
    inputs: tuple[jax.Array, ...]
    compile_s: float
    wrong: int = 0
    times_s: list[float] = field(default_factory=list)  # per call, one a sample


def place_inputs(case: Case, mesh: Mesh, seed: int) -> tuple[jax.Array, ...]:
    """Random inputs that differ between ranks, so that nothing can be folded away."""
    sharding = NamedSharding(mesh, P(AXIS))
    return tuple(
        _place(random_input(case, mesh.size, i, seed), sharding) for i in range(len(case.sizes))
    )


def prepare(case: Case, mesh: Mesh, inputs: tuple[jax.Array, ...]) -> Measured:
    """Compiles a case for `inputs`, from `place_inputs`."""
    started = time.perf_counter()
    specs = tuple(P(AXIS) for _ in inputs)
    run = jax.jit(on_mesh(body(case), mesh, specs, specs)).lower(*inputs).compile()
    return Measured(case, run, inputs, time.perf_counter() - started)


def _place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def count_wrong(measured: Measured, mesh: Mesh, seed: int) -> int:
    """Elements over all ranks that are not what NumPy gets, on the inputs of `seed`.

    Inputs reduce exactly, so every rank has one right answer to the bit: ranks that disagree are
    counted too.
    """
    case, wrong = measured.case, 0
    outputs = measured.run(*place_inputs(case, mesh, seed))
    for number, y in enumerate(outputs):
        right = expected(case, random_input(case, mesh.size, number, seed))
        for shard in y.addressable_shards:
            wrong += int((np.asarray(shard.data, np.float64) != right[shard.index]).sum())
    return _sum_over_processes(wrong, mesh)


def _sum_over_processes(value: int, mesh: Mesh) -> int:
    """The sum of a number that each process has."""
    if jax.process_count() == 1:
        return value
    here = {device.id for device in mesh.local_devices}
    first = min(here)
    share = np.array([[value if d.id == first else 0] for d in mesh.devices.flat], np.int32)
    placed = _place(share, NamedSharding(mesh, P(AXIS)))
    total = jax.jit(on_mesh(lambda x: jax.lax.psum(x, AXIS), mesh, P(AXIS), P()))(placed)
    return int(np.asarray(total.addressable_data(0)).sum())


def warm_up(measured: Sequence[Measured], calls: int) -> None:
    """Runs everything a few times before anything is timed."""
    for one in measured:
        for _ in range(calls):
            jax.block_until_ready(one.run(*one.inputs))


def time_in_turns(
    measured: Sequence[Measured], mesh: Mesh, *, iters: int, latency: bool = False
) -> None:
    """Adds `iters` samples to each of `measured`, round by round.

    Args:
      iters: samples of each.
      latency: time single calls, each waited for, instead of calls back to back.
    """
    for _ in range(iters):
        for one in measured:
            one.times_s.append(_sample(one, 1 if latency else _calls(one.case, mesh.size)))


def _calls(case: Case, n: int) -> int:
    """Calls back to back in one sample: from the size alone, so that all processes agree."""
    return int(np.clip(_SAMPLE_BYTES // max(1, payload_bytes(case, n)), 1, _MAX_CALLS))


def _sample(measured: Measured, calls: int) -> float:
    return _seconds_per_call(lambda: measured.run(*measured.inputs), calls)


def _seconds_per_call(function: Callable[[], Any], calls: int) -> float:
    """Seconds of one call among `calls` back to back.

    Few are in flight at once: emulated devices share one pool of threads, and calls of which only
    some devices have begun can take all of it and wait for each other for ever.
    """
    in_flight: deque[Any] = deque()
    started = time.perf_counter()
    for _ in range(calls):
        in_flight.append(function())
        if len(in_flight) > _IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())
    jax.block_until_ready(list(in_flight))  # a deque would count as one leaf, and not be waited for
    return (time.perf_counter() - started) / calls


def time_function(function: Callable[[], Any], iters: int, calls: int) -> float:
    """Median seconds of one call."""
    return float(np.median([_seconds_per_call(function, calls) for _ in range(iters)]))


def permute_times(mesh: Mesh, nbytes: int, permutes: int, iters: int, calls: int) -> float:
    """Median seconds of a program of `permutes` permutations, one after the other.

    Each sends `nbytes` per rank around the ring and needs what the one before brought.
    """
    pairs = [(r, (r + 1) % mesh.size) for r in range(mesh.size)]

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(permutes):
            x = jax.lax.ppermute(x, AXIS, pairs)
        return x

    x = _place(
        np.random.default_rng(0).random((mesh.size, max(1, nbytes // 4)), np.float32),
        NamedSharding(mesh, P(AXIS)),
    )
    run: Any = jax.jit(on_mesh(chain, mesh, P(AXIS), P(AXIS))).lower(x).compile()
    jax.block_until_ready(run(x))
    return time_function(lambda: run(x), iters, calls)


def add_time(nbytes: int, iters: int) -> float:
    """Median seconds of adding two arrays of `nbytes` on one device."""
    x = jnp.arange(max(1, nbytes // 4), dtype=jnp.float32)
    y = x + 1
    run: Any = jax.jit(jnp.add).lower(x, y).compile()
    jax.block_until_ready(run(x, y))
    return time_function(lambda: run(x, y), iters, 4)

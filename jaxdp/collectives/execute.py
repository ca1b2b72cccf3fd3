"""Runs a schedule on devices, as `lax.ppermute` calls on a mesh axis.

A rank's chunks are a Python list of arrays, indexed by slot.  Where all ranks use the same slots in
a round, which the ring's labelling achieves, reads and writes are static: nothing is copied but
what travels, and the data once at each end.  Elsewhere a rank selects among the slots in question.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.collectives.ops import Op
from jaxdp.collectives.schedule import Schedule, Transfer
from jaxdp.collectives.verify import verify

Held = list[Any]  # chunk arrays of one rank, by slot


def execute(schedule: Schedule, x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """Runs `schedule` on `axis_name`; called inside `shard_map` (or a `vmap` with that axis).

    Args:
      schedule: a collective over as many ranks as the axis has.
      x: this rank's array.  all_reduce, broadcast: any shape; reduce_scatter: `[n * k, ...]`;
        all_gather: `[k, ...]`.
      axis_name: the mesh axis.
      op: the reduction.

    Returns:
      all_reduce, broadcast: shaped as `x`; reduce_scatter: `[k, ...]`; all_gather: `[n * k, ...]`.

    Raises:
      ScheduleError: the schedule is wrong.
    """
    plan = _plan(schedule)
    shape = _result_shape(schedule, x.shape)
    if schedule.n == 1 or x.size == 0:
        return x.reshape(shape) if x.size else jnp.zeros(shape, x.dtype)
    # integers are added alike everywhere
    fenced = plan.fenced and jnp.issubdtype(x.dtype, jnp.floating)
    rank = lax.axis_index(axis_name)
    held = _enter(schedule, _pad(schedule, x, op), rank)
    for steps in plan.rounds:
        arrivals = [_send(step, held, rank, axis_name) for step in steps]
        for step, arrived in zip(steps, arrivals, strict=True):
            if step.reduce:
                own = _read(held, step.writes, rank)
                both = zip(own, arrived, strict=True)
                if fenced:
                    both = ((fence(a), fence(b)) for a, b in both)
                arrived = [op.combine(a, b) for a, b in both]
            held = _write(held, arrived, step, rank)
    parts = _leave(schedule, held, rank).reshape(schedule.parts[1], -1)
    return parts[:, : math.prod(shape) // len(parts)].reshape(shape)


class _Step(NamedTuple):
    """A transfer as tables over ranks.

    Ranks that do not take part read and write where the first of the others does: their value is
    neither sent nor kept, and the table stays the same for all, hence static, where it can.
    """

    pairs: tuple[tuple[int, int], ...]
    reads: np.ndarray  # [n, k]: the slots that each rank sends
    writes: np.ndarray  # [n, k]: the slots into which each rank receives
    receives: np.ndarray  # [n]: whether a rank receives
    reduce: bool


class _Plan(NamedTuple):
    rounds: tuple[tuple[_Step, ...], ...]
    fenced: bool  # ranks compute the same value separately


@lru_cache(maxsize=128)
def _plan(schedule: Schedule) -> _Plan:
    rounds = tuple(tuple(_step(schedule, t) for t in transfers) for transfers in schedule.rounds)
    return _Plan(rounds, fenced=verify(schedule) == "redundant")


def _step(schedule: Schedule, transfer: Transfer) -> _Step:
    reads: list[Any] = [None] * schedule.n
    writes: list[Any] = [None] * schedule.n
    for (source, destination), sent in zip(transfer.pairs, transfer.chunks, strict=True):
        reads[source] = [schedule.slot[source][c] for c in sent]
        writes[destination] = [schedule.slot[destination][c] for c in sent]
    receives = np.array([row is not None for row in writes])

    def fill(rows: list[Any]) -> np.ndarray:
        first = next(row for row in rows if row is not None)
        return np.array([first if row is None else row for row in rows])

    return _Step(transfer.pairs, fill(reads), fill(writes), receives, transfer.reduce)


def fence(x: jax.Array) -> jax.Array:
    """`x`, rounded to its dtype, whatever computed it; every NaN as the same NaN.

    A compiler contracts a preceding multiply into an add: fma(own, scale, received) on one rank,
    another on its partner, and so different sums.  It does not see through this comparison.
    `lax.reduce_precision` to float32 is removed, `lax.optimization_barrier` too before jax 0.12.
    """
    return jnp.where(x == x, x, jnp.asarray(jnp.nan, x.dtype))


def _result_shape(schedule: Schedule, shape: tuple[int, ...]) -> tuple[int, ...]:
    if schedule.result == "reduce_scatter":
        return (shape[0] // schedule.n, *shape[1:])
    if schedule.result == "all_gather":
        return (shape[0] * schedule.n, *shape[1:])
    return shape


def _pad(schedule: Schedule, x: jax.Array, op: Op) -> jax.Array:
    """The array as a vector whose parts consist of whole chunks; the padding changes nothing."""
    parts = x.reshape(schedule.parts[0], -1)
    padding = -parts.shape[1] % schedule.grain
    if padding:
        value = jnp.asarray(op.identity(x.dtype), x.dtype)
        parts = jnp.pad(parts, ((0, 0), (0, padding)), constant_values=value)
    return parts.reshape(-1)


def _enter(schedule: Schedule, flat: jax.Array, rank: jax.Array) -> Held:
    """Cuts the vector into chunks, each at its slot of this rank."""
    slot = np.array(schedule.slot)
    if schedule.result == "all_gather":
        # slots that are not owned are written before they are read: `verify` proves it
        pieces = jnp.split(flat, schedule.chunks // schedule.n)
        own = np.array([slot[r, list(schedule.owned(r))] for r in range(schedule.n)])
        everyone = np.ones(schedule.n, bool)
        blank: Held = [jnp.zeros_like(pieces[0])] * schedule.chunks
        return _write(blank, pieces, _Step((), own, own, everyone, reduce=False), rank)
    length = flat.size // schedule.chunks
    if _uniform(slot):
        return [lax.slice_in_dim(flat, c * length, (c + 1) * length) for c in np.argsort(slot[0])]
    # a slice whose start depends on the rank is fused into whatever reads it
    starts = _of_rank(np.argsort(slot, axis=1) * length, rank)
    return [lax.dynamic_slice(flat, (starts[s],), (length,)) for s in range(schedule.chunks)]


def _leave(schedule: Schedule, held: Held, rank: jax.Array) -> jax.Array:
    """Puts the chunks that the result consists of back into order."""
    slot = np.array(schedule.slot)
    if schedule.result == "reduce_scatter":
        own = np.array([slot[r, list(schedule.owned(r))] for r in range(schedule.n)])
        return jnp.concatenate(_read(held, own, rank))
    if _uniform(slot):
        return jnp.concatenate([held[s] for s in slot[0]])
    # in place, chunk by chunk: a gather of the concatenated chunks took as long as half a ring
    length = held[0].size
    starts = _of_rank(np.argsort(slot, axis=1) * length, rank)
    whole = jnp.zeros(length * len(held), held[0].dtype)
    for s, chunk in enumerate(held):
        whole = lax.dynamic_update_slice(whole, chunk, (starts[s],))
    return whole


def _uniform(table: np.ndarray) -> bool:
    return bool((table == table[0]).all())


def _of_rank(table: np.ndarray, rank: jax.Array) -> jax.Array:
    """`table[rank]`: a constant of the program, looked up on the device."""
    if table.dtype != bool:
        table = table.astype(np.int32 if table.max() < 2**31 else np.int64)
    return lax.dynamic_index_in_dim(table, rank, keepdims=False)


def _read(held: Held, slots: np.ndarray, rank: jax.Array) -> Held:
    """The arrays at `slots[rank]`, `slots` of shape `[n, k]`."""
    return [_select(held, column, rank) for column in slots.T]


def _select(held: Held, slots: np.ndarray, rank: jax.Array) -> jax.Array:
    candidates, which = np.unique(slots, return_inverse=True)
    if len(candidates) == 1:
        return held[candidates[0]]
    which = which.astype(bool) if len(candidates) == 2 else which
    return lax.select_n(_of_rank(which, rank), *(held[s] for s in candidates))


def _write(held: Held, values: Held, step: _Step, rank: jax.Array) -> Held:
    """The chunks with `values` at the slots in which this rank receives, the others as they are.

    `lax.ppermute` hands zeros to a rank that receives nothing: it keeps what it has.
    """
    held = list(held)
    for value, slots in zip(values, step.writes.T, strict=True):
        for s in np.unique(slots[step.receives]):
            here = step.receives & (slots == s)
            held[s] = value if here.all() else jnp.where(_of_rank(here, rank), value, held[s])
    return held


def _send(step: _Step, held: Held, rank: jax.Array, axis_name: str) -> Held:
    """What arrives at this rank by one permutation (zeros, at a rank to which nothing is sent)."""
    values = _read(held, step.reads, rank)
    if len(values) == 1:
        return [_permute(values[0], axis_name, step.pairs)]
    return jnp.split(_permute(jnp.concatenate(values), axis_name, step.pairs), len(values))


def _permute(x: jax.Array, axis_name: str, pairs) -> jax.Array:
    # XLA:CPU carries 16-bit floats through its collectives as float32; as integers they stay small
    if x.dtype in (jnp.bfloat16, jnp.float16):
        bits = lax.bitcast_convert_type(x, jnp.uint16)
        return lax.bitcast_convert_type(lax.ppermute(bits, axis_name, pairs), x.dtype)
    return lax.ppermute(x, axis_name, pairs)

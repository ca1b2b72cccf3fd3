"""Runs a schedule on devices, as `lax.ppermute` calls on a mesh axis.

A rank's chunks are a Python list of arrays, indexed by slot.  Where all ranks use the same slots in
a round, which the ring's labelling achieves, reads and writes are static: nothing is copied but
what travels, and the data once at each end.  Elsewhere the slot is looked up by rank.
"""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.collectives.ops import Op
from jaxdp.collectives.schedule import Schedule, Transfer

Slots = list[Any]  # chunk arrays of one rank, by slot


def execute(schedule: Schedule, x: jax.Array, axis_name: str, op: Op) -> jax.Array:
    """Runs `schedule` on `axis_name`; called inside `shard_map` (or a `vmap` with that axis).

    Args:
      schedule: a collective over as many ranks as the axis has.
      x: this rank's array.  all_reduce: any shape; reduce_scatter: `[n * k, ...]`;
        all_gather: `[k, ...]`.
      axis_name: the mesh axis.
      op: the reduction.

    Returns:
      all_reduce: shaped as `x`; reduce_scatter: `[k, ...]`; all_gather: `[n * k, ...]`.
    """
    shape = _result_shape(schedule, x.shape)
    if schedule.n == 1 or x.size == 0:
        return x.reshape(shape) if x.size else jnp.zeros(shape, x.dtype)
    rank = lax.axis_index(axis_name)
    held = _enter(schedule, x.reshape(-1), rank, op)
    for transfers in schedule.rounds:
        arrivals = [_send(schedule, held, t, rank, axis_name) for t in transfers]
        for transfer, arrived in zip(transfers, arrivals, strict=True):
            held = _receive(schedule, held, transfer, arrived, rank, op)
    return _leave(schedule, held, rank)[: int(np.prod(shape))].reshape(shape)


def _result_shape(schedule: Schedule, shape: tuple[int, ...]) -> tuple[int, ...]:
    if schedule.result == "reduce_scatter":
        return (shape[0] // schedule.n, *shape[1:])
    if schedule.result == "all_gather":
        return (shape[0] * schedule.n, *shape[1:])
    return shape


def _enter(schedule: Schedule, flat: jax.Array, rank: jax.Array, op: Op) -> Slots:
    """Cuts the vector into chunks, each at its slot of this rank."""
    if schedule.result == "all_gather":
        # slots that are not owned are written before they are read: `verify` proves it
        pieces = jnp.split(flat, schedule.chunks // schedule.n)
        own = np.array(
            [[schedule.slot[r][c] for c in schedule.owned(r)] for r in range(schedule.n)]
        )
        blank: Slots = [jnp.zeros_like(pieces[0])] * schedule.chunks
        return _write(blank, pieces, own, rank)
    padding = -flat.size % schedule.chunks
    if padding:
        flat = jnp.pad(flat, (0, padding), constant_values=op.identity(flat.dtype))
    chunk_at = np.argsort(np.array(schedule.slot), axis=1)
    length = flat.size // schedule.chunks
    return [_piece(flat, length, chunk_at[:, s], rank) for s in range(schedule.chunks)]


def _leave(schedule: Schedule, held: Slots, rank: jax.Array) -> jax.Array:
    """Puts the chunks that the result consists of back into order."""
    slot = np.array(schedule.slot)
    if schedule.result == "reduce_scatter":
        own = np.array([slot[r, list(schedule.owned(r))] for r in range(schedule.n)])
        return jnp.concatenate(_read(held, own, rank))
    if (slot == slot[0]).all():
        return jnp.concatenate([held[s] for s in slot[0]])
    stacked = jnp.stack(held)
    return jnp.take(stacked, jnp.asarray(slot)[rank], axis=0, mode="clip").reshape(-1)


def _piece(flat: jax.Array, length: int, chunk: np.ndarray, rank: jax.Array) -> jax.Array:
    """Chunk number `chunk[rank]` of the vector: a slice, fused into whatever reads it."""
    if (chunk == chunk[0]).all():
        return lax.slice_in_dim(flat, chunk[0] * length, (chunk[0] + 1) * length)
    start = jnp.asarray(chunk * length, _index_dtype(flat.size))[rank]
    return lax.dynamic_slice_in_dim(flat, start, length)


def _index_dtype(size: int):
    return np.int32 if size < 2**31 else np.int64


def _read(held: Slots, slots: np.ndarray, rank: jax.Array) -> Slots:
    """The arrays at `slots[rank]`, `slots` of shape `[n, k]`."""
    if (slots == slots[0]).all():
        return [held[s] for s in slots[0]]
    stacked = jnp.stack(held)
    mine = jnp.asarray(slots)[rank]
    return [
        lax.dynamic_index_in_dim(stacked, mine[i], keepdims=False) for i in range(len(slots[0]))
    ]


def _write(held: Slots, values: Slots, slots: np.ndarray, rank: jax.Array) -> Slots:
    """The chunks with `values` at `slots[rank]`."""
    if (slots == slots[0]).all():
        held = list(held)
        for s, value in zip(slots[0], values, strict=True):
            held[s] = value
        return held
    stacked = jnp.stack(held)
    mine = jnp.asarray(slots)[rank]
    for i, value in enumerate(values):
        stacked = lax.dynamic_update_index_in_dim(stacked, value, mine[i], axis=0)
    return list(stacked)


def _send(
    schedule: Schedule, held: Slots, transfer: Transfer, rank: jax.Array, axis_name: str
) -> Slots:
    """What arrives at this rank by one permutation (zeros, at a rank to which nothing is sent)."""
    slots, _ = _slot_table(schedule, transfer)
    values = _read(held, slots, rank)
    if len(values) == 1:
        return [_permute(values[0], axis_name, transfer.pairs)]
    return jnp.split(_permute(jnp.concatenate(values), axis_name, transfer.pairs), len(values))


def _permute(x: jax.Array, axis_name: str, pairs) -> jax.Array:
    # XLA:CPU carries 16-bit floats through its collectives as float32; as integers they stay small
    if x.dtype in (jnp.bfloat16, jnp.float16):
        bits = lax.bitcast_convert_type(x, jnp.uint16)
        return lax.bitcast_convert_type(lax.ppermute(bits, axis_name, pairs), x.dtype)
    return lax.ppermute(x, axis_name, pairs)


def _receive(
    schedule: Schedule, held: Slots, transfer: Transfer, arrived: Slots, rank: jax.Array, op: Op
) -> Slots:
    _, slots = _slot_table(schedule, transfer)
    own = _read(held, slots, rank)
    new = (
        [op.combine(a, b) for a, b in zip(own, arrived, strict=True)]
        if transfer.reduce
        else arrived
    )
    if len(transfer.pairs) < schedule.n:
        # ppermute hands zeros to a rank that receives nothing: it keeps what it has
        receives = np.zeros(schedule.n, bool)
        receives[[destination for _, destination in transfer.pairs]] = True
        here = jnp.asarray(receives)[rank]
        new = [jnp.where(here, a, b) for a, b in zip(new, own, strict=True)]
    return _write(held, new, slots, rank)


@lru_cache(maxsize=4096)
def _slot_table(schedule: Schedule, transfer: Transfer) -> tuple[np.ndarray, np.ndarray]:
    """Slots `[n, k]` that each rank reads and writes in a transfer.

    Ranks that do not take part read and write where the first of the others does: their value is
    neither sent nor kept, and the table stays the same for all, hence static, where it can.
    """
    reads: list[Any] = [None] * schedule.n
    writes: list[Any] = [None] * schedule.n
    for (source, destination), sent in zip(transfer.pairs, transfer.chunks, strict=True):
        reads[source] = [schedule.slot[source][c] for c in sent]
        writes[destination] = [schedule.slot[destination][c] for c in sent]

    def fill(rows: list[Any]) -> np.ndarray:
        first = next(row for row in rows if row is not None)
        return np.array([first if row is None else row for row in rows])

    return fill(reads), fill(writes)

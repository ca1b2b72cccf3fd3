"""The leaves of a state: what a checkpoint keeps of each, and whether that is what came back.

The digest is the replica guard's `fingerprint`: it adds up over shards and does not depend on the
number of devices, so that what 4 devices saved is held against what 2 hold, without a copy.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoints.files import DamageError
from jaxdp.checkpoints.manifest import LeafEntry
from jaxdp.errors import StorageError, UserError
from jaxdp.guard.fingerprint import fingerprint, fingerprint_numpy
from jaxdp.trees import named_leaves
from jaxdp.types import PyTree

# a program for a leaf takes 30 ms to compile: in that time the host hashes 10 MB
_HASHED_ON_HOST_BYTES = 1 << 20
_BLOCK_ELEMENTS = 1 << 15  # NumPy's temporaries stay in the processor's cache

_fingerprint = jax.jit(fingerprint, static_argnums=1)


def digest_leaf(leaf: Any) -> str:
    """The digest of an array on devices or in host memory, 16 hexadecimal digits.

    Raises:
      ValueError: parts of it are on devices of other processes: `digest_global` is for those.
    """
    if not isinstance(leaf, jax.Array):
        return _hexadecimal(_on_host(np.asarray(leaf), leaf.shape, (0,) * leaf.ndim))
    if leaf.sharding.is_fully_replicated:
        return _hexadecimal(_block(leaf.addressable_data(0), leaf.shape, (0,) * leaf.ndim))
    if not leaf.is_fully_addressable:
        raise ValueError(f"{leaf.shape} is spread over processes")
    total = np.zeros(2, np.uint32)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            total += _block(shard.data, leaf.shape, _start(shard.index))
    return _hexadecimal(total)


def digest_global(leaf: jax.Array) -> jax.Array:
    """What `digest_leaf` is made of, uint32 [2] on every device; all processes have to call it."""
    sharding = leaf.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.jit(fingerprint, static_argnums=1, out_shardings=whole)(leaf, leaf.shape)


def leaf_table(tree: PyTree, known: Mapping[str, LeafEntry] | None = None) -> dict[str, LeafEntry]:
    """Path -> dtype, shape and digest of every leaf of a tree of arrays.

    Args:
      tree: arrays on devices or in host memory.
      known: entries found before.  Of leaves that are spread over processes these are needed,
        unless all processes call this together.
    """
    known = known or {}
    return {name: known.get(name) or _entry(leaf) for name, leaf in named_leaves(tree)}


def spread_leaves(tree: PyTree) -> dict[str, LeafEntry]:
    """The entries of leaves that are spread over processes, which all have to call this."""
    return {name: _entry(leaf) for name, leaf in named_leaves(tree) if _is_spread(leaf)}


def _is_spread(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not leaf.is_fully_addressable
        and not leaf.sharding.is_fully_replicated
    )


def _entry(leaf: Any) -> LeafEntry:
    if _is_spread(leaf):
        digest = _hexadecimal(np.asarray(digest_global(leaf).addressable_data(0)))
    else:
        digest = digest_leaf(leaf)
    return LeafEntry(str(leaf.dtype), tuple(leaf.shape), digest)


def check_names(tree: PyTree) -> None:
    """Raises UserError where two leaves have one path: one of them would be lost."""
    seen: set[str] = set()
    for name, _ in named_leaves(tree):
        if name in seen:
            raise UserError(f"state: two leaves are called {name}; rename one, '/' included")
        seen.add(name)


def check_wanted(step: int, saved: Mapping[str, LeafEntry], target: PyTree) -> None:
    """Orbax casts and reshapes without a word: compares what is saved with what is wanted first.

    Raises:
      StorageError: a leaf is absent, or has another shape or dtype.
    """
    held = {name: f"{leaf}" for name, leaf in saved.items()}
    wanted = {name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(target)}
    different = [name for name in [*wanted, *held] if held.get(name) != wanted.get(name)]
    if different:
        name = min(different, key=lambda n: not n.startswith("params/"))  # what people know best
        raise StorageError(
            f"checkpoint {step}: {name} is {held.get(name, 'absent')} there and "
            f"{wanted.get(name, 'absent')} in this run; resume with the configuration that "
            "saved it"
        )


def check_same(saved: Mapping[str, LeafEntry], found: Mapping[str, LeafEntry]) -> None:
    """Raises DamageError where a leaf is not, to the bit, the one whose digest was saved."""
    for name in [*saved, *found]:
        if found.get(name) != saved.get(name):
            raise DamageError(f"{name} came back with other values than were saved")


def _block(block: jax.Array, shape: tuple[int, ...], start: tuple[int, ...]) -> np.ndarray:
    if block.nbytes <= _HASHED_ON_HOST_BYTES and not jnp.issubdtype(
        block.dtype, jax.dtypes.prng_key
    ):
        return _on_host(np.asarray(block), shape, start)
    return np.asarray(_fingerprint(block, shape, start))


def _on_host(block: np.ndarray, shape: tuple[int, ...], start: tuple[int, ...]) -> np.ndarray:
    if block.shape != tuple(shape) or block.size <= _BLOCK_ELEMENTS:
        return fingerprint_numpy(block, shape, start)
    flat, total = block.reshape(-1), np.zeros(2, np.uint32)  # the same places, row by row
    for first in range(0, flat.size, _BLOCK_ELEMENTS):
        piece = flat[first : first + _BLOCK_ELEMENTS]
        total += fingerprint_numpy(piece, flat.shape, (first,))
    return total


def _start(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(along.start or 0 for along in index)


def _hexadecimal(digest: np.ndarray) -> str:
    return "".join(f"{int(word):08x}" for word in digest)

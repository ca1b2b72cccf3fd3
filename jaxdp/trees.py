"""Trees of arrays: names for leaves, sizes, digests."""

import hashlib
from typing import Any

import jax
import numpy as np


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their paths, `layers/0/kernel`, in JAX's fixed order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def shapes(tree: Any) -> Any:
    """The tree with shapes and dtypes in the places of its leaves."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def count_elements(tree: Any) -> int:
    """How many numbers the tree holds."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(tree))


def count_bytes(tree: Any) -> int:
    """How many bytes the tree holds."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: Any) -> int:
    """What the tree's arrays really hold on the device that holds most, in bytes."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def digest(tree: Any) -> str:
    """SHA-256 over every leaf's path, dtype, shape and bytes, in the leaves' fixed order."""
    sha = hashlib.sha256()
    for name, leaf in named_leaves(tree):
        array = np.asarray(leaf)
        sha.update(f"{name}:{array.dtype}:{array.shape};".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()

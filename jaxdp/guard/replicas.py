"""Are the replicas equal?  Every device hashes what it holds; the hashes are gathered and compared.

A program of its own, run between steps: it reads the state in place and moves 8 bytes per leaf and
device.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.guard.fingerprint import fingerprint
from jaxdp.mesh import AXIS, on_mesh
from jaxdp.state import TrainState
from jaxdp.trees import named_leaves

_NAMED = 5  # leaves named in a message; one fault may reach all of them


class Difference(NamedTuple):
    """A leaf that is not the same on all replicas.

    Attributes:
      leaf: its path in the train state, `params/layers/0/kernel`.
      replicas: the devices of the mesh, by number, that differ from the majority; all of them where
        no more than half agree (always so on two devices).
    """

    leaf: str
    replicas: tuple[int, ...]


def replicated_leaves(state: TrainState) -> list[tuple[str, jax.Array]]:
    """The leaves that every device holds whole, with their names.

    Exempt are the synchronisation's state and whatever is sharded: they differ by right.
    """
    leaves = named_leaves(state._replace(sync_state=()))
    return [(name, leaf) for name, leaf in leaves if leaf.sharding.is_fully_replicated]


def fingerprints(mesh: Mesh, leaves: Sequence[jax.Array]) -> np.ndarray:
    """The hash of every leaf on every device, uint32 `[devices, leaves, 2]`.

    Args:
      mesh: of one axis, `jaxdp.mesh.AXIS`.
      leaves: arrays that every device of the mesh holds whole.
    """
    return np.asarray(_fingerprints(mesh, list(leaves)))


@partial(jax.jit, static_argnums=0)
def _fingerprints(mesh: Mesh, leaves: list[Any]) -> jax.Array:
    def body(leaves: list[Any]) -> jax.Array:
        return lax.all_gather(jnp.stack([fingerprint(leaf) for leaf in leaves]), AXIS)

    return on_mesh(body, mesh, P(), P())(leaves)


def compare_replicas(mesh: Mesh, state: TrainState) -> list[Difference]:
    """The leaves of `state` that are not equal, to the bit, on all devices of `mesh`."""
    if mesh.size == 1:
        return []
    names, leaves = zip(*replicated_leaves(state), strict=True)
    hashes = fingerprints(mesh, leaves)
    differing = np.flatnonzero((hashes != hashes[:1]).any((0, 2)))
    return [Difference(names[i], odd_ones(hashes[:, i])) for i in differing]


def odd_ones(hashes: np.ndarray) -> tuple[int, ...]:
    """Which rows of `[replicas, 2]` differ from what more than half agree on; else all of them."""
    rows = [tuple(row) for row in hashes.tolist()]
    common, count = Counter(rows).most_common(1)[0]
    agree = 2 * count > len(rows)
    return tuple(r for r, row in enumerate(rows) if not agree or row != common)


def describe_differences(found: Sequence[Difference], devices: int) -> str:
    """Differences in words: the leaves, and on which replicas."""
    shown = [f"{leaf} on {_replicas(odd, devices)}" for leaf, odd in found[:_NAMED]]
    more = f" and {len(found) - _NAMED} leaves more" if len(found) > _NAMED else ""
    return ", ".join(shown) + more


def _replicas(numbers: tuple[int, ...], devices: int) -> str:
    if len(numbers) == devices:
        return f"all {devices} replicas (no majority)" if devices > 2 else "replicas 0 and 1"
    words = ", ".join(map(str, numbers))
    return f"replica{'s' * (len(numbers) > 1)} {words} of {devices}"

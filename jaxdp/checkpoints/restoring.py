"""A step read back: verified before Orbax reads it, and again when its arrays are there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdp.checkpoints import engine, files, leaves, manifest
from jaxdp.checkpoints.agreement import any_process
from jaxdp.checkpoints.files import DamageError
from jaxdp.checkpoints.manifest import LeafEntry, Manifest, strangers
from jaxdp.mesh import place
from jaxdp.state import SavedForm, TrainState
from jaxdp.trees import named_leaves
from jaxdp.types import PyTree


def verified(folder: Path, digests: bool = True) -> Manifest:
    """The manifest of a step whose files are those that were written.

    Args:
      folder: of the step.
      digests: False holds sizes alone against it.

    Raises:
      DamageError: they are not.
      StorageError: a later version wrote it.
    """
    held = manifest.read(folder)
    files.check(folder, held.files, digests)
    return held


def restore_step(folder: Path, like: TrainState, form: SavedForm) -> tuple[TrainState, Manifest]:
    """The state of a step, and its manifest.

    Args:
      folder: of the step.
      like: a state of the shapes, dtypes and shardings wanted.
      form: the step's, in which a state is kept.

    Raises:
      DamageError: it is not what was saved.
      StorageError: a leaf is absent, or has another shape or dtype; a later version wrote it.
    """
    held, kept = _agreed_manifest(folder), form.like(like)
    before = _other_slots(held.leaves, like) if form.respread else None
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), kept._asdict()
    )
    if before is not None:  # NumPy: as it was saved, whatever the devices are now
        target["sync_state"] = jax.tree.map(
            lambda x: np.empty((before, *x.shape[1:]), x.dtype), like.sync_state
        )
    leaves.check_wanted(held.step, held.leaves, target)
    restored = _read(folder, target, held)
    found = TrainState(**restored)
    if before is not None and (rule := form.respread):
        devices = len(jax.tree.leaves(like.sync_state)[0])
        slots = rule(found.sync_state, devices)
        found = found._replace(sync_state=jax.tree.map(_placed_as, slots, like.sync_state))
    return form.restored(found, like), held


def _agreed_manifest(folder: Path) -> Manifest:
    """Read by every process; the files are the same for all, and held against it by the first."""
    found: list[Manifest] = []

    def read() -> None:
        found.append(manifest.read(folder))
        if jax.process_index() == 0:
            files.check(folder, found[0].files)

    _agree(_damage(read))
    return found[0]


def _read(folder: Path, target: PyTree, held: Manifest) -> dict[str, Any]:
    restored: dict[str, Any] = {}

    def read() -> None:
        try:
            restored.update(engine.restore(folder, target))
        except DamageError as damage:  # Orbax takes files of some names for older formats
            added = strangers(folder, held)
            hint = f" ({added[0]} was added, and may be why)" if added else ""
            raise DamageError(f"{damage}{hint}") from damage

    _agree(_damage(read))
    found = leaves.leaf_table(restored)  # a program of all processes: outside of what may fail
    _agree(_damage(lambda: leaves.check_same(held.leaves, found)))
    return restored


def _damage(look: Callable[[], None]) -> DamageError | None:
    try:
        look()
    except DamageError as damage:
        return damage
    return None


def _agree(damage: DamageError | None) -> None:
    """What one process finds damaged, none uses."""
    if any_process(damage is not None):
        raise damage or DamageError("another process could not read it")


def _other_slots(saved: Mapping[str, LeafEntry], like: TrainState) -> int | None:
    """The devices whose sync_state was saved, where their number is not that of `like`."""
    for name, leaf in named_leaves({"sync_state": like.sync_state}):
        shape = saved[name].shape if name in saved else ()
        if shape and shape[0] != leaf.shape[0]:
            return shape[0]
    return None


def _placed_as(x: Any, like: jax.Array) -> jax.Array:
    assert isinstance(like.sharding, NamedSharding)
    return place(x, like.sharding)

"""What checkpoints hold, read into host memory: differences, norms, checks of the values."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxdp
from jaxdp.checkpoints import engine, files, leaves, manifest
from jaxdp.checkpoints.export import check_new, export_leaves
from jaxdp.checkpoints.files import DamageError
from jaxdp.checkpoints.manifest import LeafEntry, Manifest
from jaxdp.errors import StorageError, UserError


class LeafDifference(NamedTuple):
    """A leaf that two checkpoints do not have alike.

    Attributes:
      name: its path in the state.
      words: how they differ.
    """

    name: str
    words: str


def verify_leaves(folder: Path, held: Manifest) -> None:
    """Reads a step and holds each leaf against the digest that was taken when it was saved.

    Raises:
      DamageError: one is another, or it cannot be read.
    """
    leaves.check_same(held.leaves, leaves.leaf_table(engine.read_leaves(folder)))


def norms(folder: Path, held: Manifest) -> dict[str, float]:
    """Path -> the Euclidean norm of each leaf, in float64.

    Raises:
      StorageError: the step is damaged.
    """
    return {name: _norm(_wide(leaf)) for name, leaf in _read(folder, held).items()}


def differences(a: Path, held_a: Manifest, b: Path, held_b: Manifest) -> list[LeafDifference]:
    """The leaves in which two steps differ, in the order of the first, and by how much.

    Args:
      a, b: their folders.
      held_a, held_b: their manifests; leaves of one digest are not compared any further.

    Raises:
      StorageError: a step is damaged.
    """
    names = [*held_a.leaves, *(name for name in held_b.leaves if name not in held_a.leaves)]
    names = [name for name in names if held_a.leaves.get(name) != held_b.leaves.get(name)]
    if not names:
        return []
    left, right = _read(a, held_a), _read(b, held_b)
    return [
        LeafDifference(
            name, _difference(held_a.leaves.get(name), held_b.leaves.get(name), left, right, name)
        )
        for name in names
    ]


def _difference(
    a: LeafEntry | None,
    b: LeafEntry | None,
    left: dict[str, np.ndarray],
    right: dict[str, np.ndarray],
    name: str,
) -> str:
    if a is None or b is None:
        return f"{a or 'absent'} and {b or 'absent'}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a} and {b}"
    x, y = _wide(left[name]), _wide(right[name])
    with np.errstate(invalid="ignore"):  # inf - inf
        change, most = _norm(x - y), float(np.max(np.abs(x - y)))
    count, scale = int(np.count_nonzero(x != y)), _norm(x)
    relative = f", {change / scale:.3g} of the first's norm" if scale else ""
    return f"{count:,} of {x.size:,} elements, by {most:.3g} at most{relative}"


def export(folder: Path, held: Manifest, path: Path) -> int:
    """Writes the parameters of a step, verified, as a safetensors file; returns how many arrays.

    Raises:
      UserError: `path` is there already, or its folder is not.
      StorageError: the step is damaged, or the file cannot be written.
    """
    check_new(path)
    return export_leaves(
        path, _read(folder, held), {"jaxdp": jaxdp.__version__, "step": str(held.step)}
    )


def adopt(folder: Path) -> Manifest:
    """Gives a step that has no manifest one, after it was read whole.

    For checkpoints of versions before manifests.  Nobody knows what was saved: what is there now is
    what will be verified from now on.

    Raises:
      UserError: it has a manifest, or is no folder of this run's own.
      StorageError: it cannot be read, or not be written.
    """
    if folder.is_symlink():
        raise UserError(f"{folder}: is a symbolic link; copy what it points to")
    if not manifest.can_be_given_one(folder):
        raise UserError(f"{folder}: has a manifest; nothing to take over")
    try:
        table = leaves.leaf_table(engine.read_leaves(folder))
        written = files.entries(folder, manifest.payload(folder))
        facts = {"adopted_at": datetime.now(UTC).isoformat(timespec="seconds")}
        held = Manifest(int(folder.name), table, written, facts, _old_meta(folder))
        manifest.write(folder, held)
    except DamageError as damage:
        raise StorageError(f"checkpoint {folder.name}: {damage}") from damage
    except OSError as error:
        raise StorageError(f"{folder}: cannot be taken over: {error.strerror}") from error
    return held


def _old_meta(folder: Path) -> dict[str, Any]:
    """What a run kept besides, where versions before manifests had it."""
    try:
        meta = json.loads((folder / "meta" / "metadata").read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DamageError("meta/metadata is damaged: it is no JSON") from error
    return meta if isinstance(meta, dict) else {}


def _read(folder: Path, held: Manifest) -> dict[str, np.ndarray]:
    """The leaves of a step, which are those that were saved."""
    try:
        found = engine.read_leaves(folder)
        leaves.check_same(held.leaves, leaves.leaf_table(found))
    except DamageError as damage:
        raise StorageError(f"checkpoint {folder.name} is damaged: {damage}") from damage
    return found


def _wide(leaf: np.ndarray) -> np.ndarray:
    """In a type in which numbers of every type have a difference and a square."""
    complex_ = np.issubdtype(leaf.dtype, np.complexfloating)
    return leaf.astype(np.complex128 if complex_ else np.float64)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.reshape(-1)))

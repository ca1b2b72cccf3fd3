"""manifest.json: what a checkpoint has to hold.  A folder without one is no checkpoint.

It is written last, before the folder gets the name of its step.  Two layers of digests: of the
files, so that rot is found before anything reads them, and of the leaves, taken on the device from
the state that was saved and held against the arrays that come back.  Reading it needs no JAX.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp.checkpoints.files import HASH, DamageError, FileEntry, digest_of, sizes, write_whole
from jaxdp.errors import StorageError

NAME = "manifest.json"
SCHEMA = 1
_LARGEST_BYTES = 1 << 26  # what a state of 400,000 leaves takes

# what Orbax writes to know that it has finished; copying may lose them, and nothing here reads them
_MARKERS = frozenset({"_CHECKPOINT_METADATA", "commit_success.txt"})


class LeafEntry(NamedTuple):
    """What a leaf has to be.

    Attributes:
      dtype: its name, `float32`.
      shape: of the whole array, whatever devices hold of it.
      digest: `jaxdp.guard.fingerprint` of it, 16 hexadecimal digits: the same for any number of
        devices.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint has to hold, and what is to be known of it.

    Attributes:
      step: optimizer steps taken or skipped: the position in data and schedule.
      leaves: path in the state -> what it has to be.
      files: path below the step's folder -> what it has to be.
      facts: of the saving: when, by which versions, on how many devices and processes.
      run: what the run wanted to be kept: seed, position in the data, guard's record, ...
    """

    step: int
    leaves: Mapping[str, LeafEntry]
    files: dict[str, FileEntry]
    facts: Mapping[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(entry.bytes for entry in self.files.values())


def is_there(folder: Path) -> bool:
    """Whether a step's folder has a manifest, whatever that says: only such folders are ours."""
    return not folder.is_symlink() and (folder / NAME).is_file()


def can_be_given_one(folder: Path) -> bool:
    """Whether this may be a step of a version before manifests: a folder that has nothing there."""
    return folder.is_dir() and not folder.is_symlink() and not os.path.lexists(folder / NAME)


def payload(folder: Path) -> list[str]:
    """The files below a step's folder that its manifest answers for."""
    return [name for name in sizes(folder) if name != NAME and Path(name).name not in _MARKERS]


def strangers(folder: Path, manifest: Manifest) -> list[str]:
    """Files in a step's folder that it does not hold."""
    return sorted(set(payload(folder)) - manifest.files.keys())


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a step into its folder; it is on the disk when this returns."""
    body = {
        "schema": SCHEMA,
        "step": manifest.step,
        "hash": HASH,
        "facts": dict(manifest.facts),
        "run": manifest.run,
        "leaves": {name: list(leaf) for name, leaf in manifest.leaves.items()},
        "files": {name: list(file) for name, file in manifest.files.items()},
    }
    text = json.dumps(body | {"seal": _seal(body)}, indent=1)
    write_whole(folder / NAME, text.encode())


def read(folder: Path) -> Manifest:
    """The manifest of the step whose folder this is.

    Raises:
      DamageError: there is none, it is damaged, or it belongs to another step.
      StorageError: a later version wrote it.
    """
    body = _read_json(folder)
    seal = body.pop("seal", None)
    if seal != _seal(body):
        raise DamageError(f"{NAME} is damaged: its content does not fit its seal")
    if body.get("schema") != SCHEMA or body.get("hash") != HASH:
        raise StorageError(
            f"{folder / NAME}: schema {body.get('schema')} with {body.get('hash')}; this version "
            f"reads schema {SCHEMA} with {HASH}: use the version that wrote it"
        )
    try:
        manifest = Manifest(
            step=body["step"],
            leaves={
                name: LeafEntry(dtype, tuple(shape), digest)
                for name, (dtype, shape, digest) in body["leaves"].items()
            },
            files={name: FileEntry(*entry) for name, entry in body["files"].items()},
            facts=body["facts"],
            run=body["run"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(f"{NAME} is damaged: {error!r}") from error
    if str(manifest.step) != folder.name:
        raise DamageError(f"{NAME} is that of step {manifest.step}")
    return manifest


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    try:
        for place in (folder, path):
            if place.is_symlink():
                raise DamageError(f"{place.name} is a symbolic link; copy what it points to")
        if not folder.is_dir():
            raise DamageError("it is a file" if folder.exists() else "it is missing")
        if not path.is_file():
            raise DamageError(f"it has no {NAME}")
        if path.stat().st_size > _LARGEST_BYTES:
            raise DamageError(f"{NAME} has {path.stat().st_size} bytes")
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise DamageError(f"{NAME} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{NAME} is damaged: it is no JSON") from error
    if not isinstance(body, dict):
        raise DamageError(f"{NAME} is damaged: it holds no object")
    return body


def _seal(body: Mapping[str, Any]) -> str:
    """The digest of the rest of the manifest, whatever its layout."""
    return digest_of(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())

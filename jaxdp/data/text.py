"""Text as bytes: Python's own standard library, or one file of the user."""

import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np

from jaxdp.data.files import expand, reading
from jaxdp.data.source import Dataset, heldout_count
from jaxdp.data.windows import Windows
from jaxdp.errors import UserError

# Installed packages, tests and caches, and files that name the machine Python was built on.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
_SEPARATOR = b"\0"  # between files: in no source file, so that it marks an end of file
_HELDOUT_ONE_IN = 20


def load_stdlib_text(context: int = 128) -> Dataset:
    """The source of Python's standard library as bytes, about 10 MB; one file in 20 is held out.

    A file is held out by a hash of its path in the library: the same on every machine that has this
    version of Python, and (for files they share) in every version.

    Args:
      context: tokens per example, and targets per example.

    Raises:
      UserError: a Python without its source; a context below 1 or longer than the text.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files: dict[bool, list[bytes]] = {False: [], True: []}
    for path in _source_files(folder):
        with reading(folder / path, "a file of the standard library"):
            files[_is_heldout(path)].append((folder / path).read_bytes())
    if not files[False] or not files[True]:
        raise UserError(
            f"{folder}: {sum(map(len, files.values()))} source files, too few to hold some out; "
            f"use a Python that has its library as .py files, or data kind text_file"
        )
    train, heldout = (_SEPARATOR.join(files[part]) for part in (False, True))
    facts: dict[str, str | int] = {
        "path": str(folder),
        "python": platform.python_version(),
        "train_files": len(files[False]),
        "heldout_files": len(files[True]),
        "train_bytes": len(train),
        "heldout_bytes": len(heldout),
        "sha256": hashlib.sha256(train + heldout).hexdigest(),
    }
    return _byte_dataset("stdlib_text", train, heldout, context, folder, facts)


def _source_files(folder: Path) -> list[str]:
    """Paths within `folder`, with `/` on every system, sorted."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                found.append(Path(parent, name).relative_to(folder).as_posix())
    return sorted(found)


def _is_heldout(path: str) -> bool:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % _HELDOUT_ONE_IN == 0


def load_text_file(path: str | Path, context: int = 128, heldout_fraction: float = 0.05) -> Dataset:
    """The bytes of one file; its end is held out.

    Args:
      path: any file.
      context: tokens per example, and targets per example.
      heldout_fraction: of the bytes.

    Raises:
      UserError: a file that cannot be read, or with a part too short for one example.
    """
    path = expand(path)
    with reading(path, "a text file"):
        content = path.read_bytes()
    cut = len(content) - heldout_count(len(content), heldout_fraction, path)
    facts: dict[str, str | int] = {
        "path": str(path),
        "train_bytes": cut,
        "heldout_bytes": len(content) - cut,
        "sha256": hashlib.sha256(content).hexdigest(),  # of what was read: a pipe has it once
    }
    return _byte_dataset("text_file", content[:cut], content[cut:], context, path, facts)


def _byte_dataset(
    name: str,
    train: bytes,
    heldout: bytes,
    context: int,
    path: Path,
    facts: dict[str, str | int],
) -> Dataset:
    return Dataset(
        name,
        "language",
        train=Windows(np.frombuffer(train, np.uint8), context, path),
        heldout=Windows(np.frombuffer(heldout, np.uint8), context, path),
        num_classes=256,
        shape=(context,),
        facts=facts,
        bytes_per_token=1.0,
    )

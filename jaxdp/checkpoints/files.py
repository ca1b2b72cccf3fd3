"""The files below a folder, and a digest of each.  Needs no JAX."""

import contextlib
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

# 128 bits; of the hashes tried, the fastest: it finds rot, and is no defence against an adversary
HASH = "xxh3_128"
_BLOCK_BYTES = 1 << 22
_THREADS = 4


class DamageError(Exception):
    """A checkpoint that is not what was saved.  The message says what is wrong, in few words."""


class FileEntry(NamedTuple):
    """What a file has to be: its size in bytes, and the digest of its content in hexadecimal."""

    bytes: int
    digest: str


def digest_of(text: bytes) -> str:
    """The digest of some bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(text)


def digest_of_file(path: Path) -> str:
    """The digest of a file's content, read in blocks."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sizes(folder: Path) -> dict[str, int]:
    """Path below `folder` -> bytes, of every regular file; symbolic links are not followed.

    Raises:
      DamageError: a folder cannot be listed.
    """
    found = {}
    for at, _, names in os.walk(folder, onerror=_unreadable):
        for path in (Path(at, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):  # a pipe would be waited for
                    found[path.relative_to(folder).as_posix()] = status.st_size
    return found


def _unreadable(error: OSError) -> None:
    raise DamageError(f"{error.filename} cannot be listed: {error.strerror}") from error


def entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Sizes and digests of the named files below `folder`."""
    names = sorted(names)
    with ThreadPoolExecutor(_THREADS) as pool:  # the hash and reading let other threads run
        digests = list(pool.map(lambda name: digest_of_file(folder / name), names))
    return {
        name: FileEntry((folder / name).stat().st_size, digest)
        for name, digest in zip(names, digests, strict=True)
    }


def check(folder: Path, expected: dict[str, FileEntry], digests: bool = True) -> None:
    """Holds the files below `folder` against what they have to be.

    Other files are left alone: people and systems leave some.

    Args:
      folder: of a checkpoint.
      expected: path below `folder` -> what it has to be.
      digests: False looks at sizes alone.

    Raises:
      DamageError: one is missing, has another size, or another content.
    """
    try:
        _check_sizes(folder, expected)
        read = entries(folder, expected) if digests else expected
    except OSError as error:
        name = Path(error.filename or folder).name
        raise DamageError(f"{name} cannot be read: {error.strerror}") from error
    for name, entry in expected.items():
        if read[name].digest != entry.digest:
            raise DamageError(f"{name} has another content than was written")


def _check_sizes(folder: Path, expected: dict[str, FileEntry]) -> None:
    found = sizes(folder)
    for name, entry in expected.items():
        if name not in found:
            raise DamageError(f"{name} {_what_is_there(folder, name)}")
        if found[name] != entry.bytes:
            raise DamageError(f"{name} has {found[name]} bytes instead of {entry.bytes}")


def _what_is_there(folder: Path, name: str) -> str:
    path = folder / name
    if path.is_symlink():
        return "is a symbolic link; expected a file"
    if path.is_dir():
        return "is a folder; expected a file"
    behind = any((folder / parent).is_symlink() for parent in Path(name).parents[:-1])
    return "is behind a symbolic link; expected a file" if behind else "is missing"


def sync_folder(folder: Path) -> None:
    """Makes names in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: bytes) -> None:
    """Writes a file whole or not at all, and returns when it is on the disk."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)

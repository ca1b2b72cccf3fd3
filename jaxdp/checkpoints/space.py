"""Whether a disk has room for what will be saved, asked before it is needed.  Needs no JAX."""

import os
import secrets
import shutil
from pathlib import Path

from jaxdp.errors import StorageError
from jaxdp.sizes import format_bytes
from jaxdp.wording import counted

# of each step: names, shapes and digests of its leaves; and what a file system adds to its files
_BESIDES_BYTES = 1 << 16


def check_space(folder: Path, state_bytes: int, copies: int) -> None:
    """Returns if `copies` more checkpoints fit.

    Args:
      folder: where they will be; it exists.
      state_bytes: of one of them, before compression.
      copies: how many.

    Raises:
      StorageError: they do not, or it cannot be known.
    """
    each = state_bytes + _BESIDES_BYTES
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:  # removed, or on a disk that is away
        raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error
    if free < copies * each:
        raise StorageError(
            f"{folder}: {counted(copies, 'checkpoint')} of {format_bytes(each)} "
            f"need{'s' if copies == 1 else ''} {format_bytes(copies * each)}, and "
            f"{format_bytes(free)} are free; make room, lower checkpoint.keep, or choose another "
            "folder with --out"
        )


def check_writable(folder: Path) -> None:
    """Returns if files can be made in `folder`; leaves none.

    Raises:
      StorageError: they cannot.
    """
    probe = folder / f".{secrets.token_hex(8)}.partial"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        probe.unlink()
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot be written: {error.strerror}; choose another folder with --out"
        ) from error

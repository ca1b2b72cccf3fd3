"""Files that come into being whole, for one of those who try."""

import os
import secrets
from pathlib import Path


def created(path: Path, record: bytes) -> bool:
    """Whether a file `path` was made, whole: False where there is one, whoever else tries."""
    partial = _write_beside(path, record)
    try:
        os.link(partial, path)
    except FileExistsError:
        return False
    except OSError:  # no hard links here
        return _exclusively(path, record)
    finally:
        partial.unlink()
    return True


def _exclusively(path: Path, record: bytes) -> bool:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(file, record)
    finally:
        os.close(file)
    return True


def put(path: Path, record: bytes) -> None:
    """Puts a file in the place of another."""
    _write_beside(path, record).replace(path)


def _write_beside(path: Path, record: bytes) -> Path:
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        _exclusively(partial, record)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return partial

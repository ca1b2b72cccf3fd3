"""Reading files that may be missing, unreadable or damaged: one line for each mistake."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxdp.errors import UserError


def expand(path: str | Path) -> Path:
    """`path` with `~` replaced; unlike `Path.expanduser` it lets an unknown user stand."""
    return Path(os.path.expanduser(path))


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Turns every failure to read `path` into a `UserError` of one line that names the file.

    Args:
      path: the file that the block reads.
      expected: what it should be, such as "an .npz file".
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; expected {expected}; check the path") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder; expected {expected}; give the file") from error
    except PermissionError as error:
        raise UserError(f"{path}: not readable by this user; expected {expected}") from error
    except UserError:
        raise
    except Exception as error:
        # On damaged bytes the readers of zip, gzip and .npy raise a dozen types, among them
        # NotImplementedError ("zip file version 15.2") and tokenize.TokenError.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path}: cannot be read as {expected} ({reason}); it is damaged or of another kind"
        ) from error


def digest(*paths: Path) -> str:
    """The sha256 of the contents of the files, one after the other (about 1 s per GB)."""
    result = hashlib.sha256()
    for path in paths:
        with reading(path, "a readable file"), open(path, "rb") as file:
            while block := file.read(1 << 20):
                result.update(block)
    return result.hexdigest()

"""Parameters as a safetensors file, for other tools, and back.  Needs no JAX.

A leaf is called as in every message of a run: `params/hidden/00/kernel`, `model_state/...` what the
model keeps besides.  The format holds names, shapes, dtypes and raw numbers, no code.
"""

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxdp.errors import StorageError, UserError

PARTS = ("params", "model_state")  # of a train state: what a model computes with
_SHOWN = 8  # lines about one file
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class Form(NamedTuple):
    """Of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def check_new(path: Path) -> None:
    """Raises UserError if a file `path` cannot be new: it is there, or its folder is not."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{path}: is there already; give another name, or remove it")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}")


def export_leaves(path: Path, leaves: Mapping[str, np.ndarray], about: Mapping[str, str]) -> int:
    """Writes those of `leaves` that belong to the model, whole or not at all.

    Args:
      path: a file that is not there yet, in a folder that is.
      leaves: name -> array, of a train state.
      about: texts for people and tools, such as the step, kept in the file's head.

    Returns:
      How many arrays were written.

    Raises:
      UserError: there is such a file, or no such folder.
      StorageError: it cannot be written.
    """
    check_new(path)
    # 0 dimensions stay 0, which np.ascontiguousarray would make 1
    wanted = {
        name: np.array(leaf, order="C")
        for name, leaf in leaves.items()
        if name.split("/")[0] in PARTS
    }
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        save_file(wanted, partial, dict(about))
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{path}: cannot be written: {reason}") from error
    finally:
        with suppress(OSError):  # a read-only disk refuses even what is not there
            partial.unlink()
    return len(wanted)


def check_importable(path: Path, wanted: Mapping[str, Form]) -> None:
    """Returns if a file holds exactly the arrays `wanted`: nothing is cast, added or left out.

    Raises:
      UserError: it does not, with a line for each array; or it cannot be read.
    """
    with _opened(path) as file:
        found = {name: _form(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    lines = []
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        there, here = found.get(name), wanted.get(name)
        if there != here:
            lines.append(
                f"init_from: {path}: {name} is {there or 'absent'} there and {here or 'absent'} in "
                "this model"
            )
    if len(lines) > _SHOWN:
        lines[_SHOWN - 1 :] = [f"init_from: {path}: and {len(lines) - _SHOWN + 1} more"]
    if lines:
        raise UserError(*lines)


def import_leaves(path: Path, wanted: Mapping[str, Form]) -> dict[str, np.ndarray]:
    """The arrays of a file, checked by `check_importable`."""
    check_importable(path, wanted)
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in wanted}


def _opened(path: Path) -> Any:
    try:
        if path.is_dir():
            raise UserError(f"init_from: {path} is a folder; expected a safetensors file")
        return safe_open(path, "np")
    except FileNotFoundError:
        raise UserError(f"init_from: {path}: no such file") from None
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"init_from: {path}: not readable as safetensors: {reason}; expected a file of "
            "`python -m jaxdp.checkpoint export`"
        ) from error


def _form(part: Any) -> Form:
    dtype = str(part.get_dtype())
    return Form(_DTYPES.get(dtype, dtype), tuple(part.get_shape()))

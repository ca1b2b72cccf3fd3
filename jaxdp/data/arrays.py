"""Classification data of the user: `inputs` and `label` in an .npz, or in two .npy files.

Everything is checked when it is loaded, in one sequential pass (about a second per GB): a NaN is
reported before the first step, and not in the middle of a night.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdp.data.files import digest, expand, reading
from jaxdp.data.source import Dataset, Source, Subset, heldout_count, split
from jaxdp.errors import UserError

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Arrays:
    """Numbers that may lie in a memory-mapped file, read as float32.

    Attributes:
      inputs: [n, *shape], any real dtype; the values are not rescaled.
      label: int32 [n].
    """

    inputs: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        inputs = self.inputs[indices].astype(np.float32, copy=False)
        return {"inputs": inputs, "label": self.label[indices]}


def load_npz(
    path: str | Path,
    heldout_path: str | Path | None = None,
    heldout_fraction: float | None = None,
    num_classes: int | None = None,
) -> Dataset:
    """Arrays of the user's own.

    Args:
      path: an .npz with `inputs` [n, *shape] (numbers) and `label` [n] (integers), or a folder with
        `inputs.npy` and `label.npy`, which are memory-mapped.  Nothing pickled is ever loaded.
      heldout_path: the same for the held-out examples.
      heldout_fraction: or the fraction of `path` that is held out, by a fixed shuffle; 0.1 by
        default.
      num_classes: the highest label + 1 by default.

    Raises:
      UserError: a missing or damaged file; a wrong dtype or shape, a value that is not finite as
        float32, a label out of range, each with its file and record.
    """
    if heldout_path is not None and heldout_fraction is not None:
        raise UserError("heldout_path and heldout_fraction are both given: give one of them")
    paths = [expand(p) for p in (path, heldout_path) if p is not None]
    parts = [_read(p) for p in paths]
    num_classes = _checked_classes(paths, parts, num_classes)
    train, heldout = _divide(paths, parts, heldout_fraction)
    facts: dict[str, str | int] = {"path": str(paths[0])}
    if heldout_path is not None:
        facts["heldout_path"] = str(paths[1])
    facts |= {"train": len(train), "heldout": len(heldout)}
    facts["sha256"] = digest(*(file for p in paths for file in _files(p)))
    shape = parts[0].inputs.shape[1:]
    return Dataset("npz", "classification", train, heldout, num_classes, shape, facts)


def _divide(
    paths: list[Path], parts: list[Arrays], fraction: float | None
) -> tuple[Source, Source]:
    """Training and held-out examples: two parts as they are, or one part divided."""
    whole = parts[0]
    if len(parts) == 1:
        count = heldout_count(len(whole), 0.1 if fraction is None else fraction, paths[0])
        train, heldout = split(len(whole), count)
        return Subset(whole, train), Subset(whole, heldout)
    if parts[1].inputs.shape[1:] != whole.inputs.shape[1:]:
        raise UserError(
            f"{paths[1]}: inputs have shape {parts[1].inputs.shape[1:]}; expected "
            f"{whole.inputs.shape[1:]} as in {paths[0]}"
        )
    return whole, parts[1]


def _files(path: Path) -> list[Path]:
    return [path / "inputs.npy", path / "label.npy"] if os.path.isdir(path) else [path]


def _read(path: Path) -> Arrays:
    """The arrays of an .npz or of a folder, checked except for the range of the labels."""
    if os.path.isdir(path):
        places = {name: path / f"{name}.npy" for name in ("inputs", "label")}
        arrays = {name: _map_npy(place) for name, place in places.items()}
    else:
        places = {"inputs": path, "label": path}
        arrays = _read_npz(path)
    inputs, label = arrays["inputs"], arrays["label"]
    if label.dtype.kind not in "iu" or label.ndim != 1:
        raise UserError(
            f"{places['label']}: label has dtype {label.dtype} and shape {label.shape}; expected "
            f"integers of shape [n], one class number per record from record 0 on"
        )
    if inputs.dtype.kind not in "iufb" or inputs.ndim < 2:
        raise UserError(
            f"{places['inputs']}: inputs have dtype {inputs.dtype} and shape {inputs.shape}; "
            f"expected numbers of shape [n, ...] in every record from record 0 on"
        )
    if len(inputs) != len(label) or not len(label):
        raise UserError(
            f"{path}: {len(inputs)} inputs and {len(label)} labels; expected one label for "
            f"each input, and at least one record"
        )
    _check_finite(inputs, places["inputs"])
    _check_labels(label, places["label"])
    return Arrays(inputs, label.astype(np.int32))


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    # Opened here, since NumPy leaves a file open that it finds to be no zip archive.
    with reading(path, "an .npz file of numbers (never pickled)"), open(path, "rb") as file:
        if not file.read(4).startswith(b"PK"):
            raise ValueError("no zip archive; an .npy file goes into a folder, as inputs.npy")
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            if {"inputs", "label"} - set(loaded):
                raise UserError(
                    f"{path}: holds {', '.join(loaded) or 'no array'}; expected inputs and label; "
                    f"save it again with np.savez(path, inputs=..., label=...)"
                )
            return {name: loaded[name] for name in ("inputs", "label")}


def _map_npy(path: Path) -> np.ndarray:
    with reading(path, "an .npy file of numbers (never pickled)"):
        # `asarray`: the same mapped memory without memmap's cost at each index.
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    records = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), records):
        yield start, array[start : start + records]


def _check_finite(inputs: np.ndarray, path: Path) -> None:
    if inputs.dtype.kind != "f":
        return
    for start, chunk in _chunks(inputs):
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, and is found
            finite = np.isfinite(chunk.astype(np.float32, copy=False))
        if not finite.all():
            place = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise UserError(
                f"{path}: {chunk[place]} in inputs at record {start + place[0]}, element "
                f"{list(place[1:])}; expected finite float32 values; repair or remove the record"
            )


def _check_labels(label: np.ndarray, path: Path) -> None:
    """Refuses labels that int32 cannot hold, or below 0, before any conversion hides them."""
    if (wrong := np.flatnonzero((label < 0) | (label >= 2**31 - 1))).size:
        raise UserError(
            f"{path}: label {label[wrong[0]]} at record {wrong[0]}; expected class numbers from 0 "
            f"on; repair or remove the record"
        )


def _checked_classes(paths: list[Path], parts: list[Arrays], num_classes: int | None) -> int:
    """The number of classes, all labels below it."""
    if num_classes is not None and num_classes < 1:
        raise UserError(f"num_classes is {num_classes}: give at least 1")
    # Without `num_classes` one damaged label would ask for a network with two billion outputs.
    limit = max(len(p) for p in parts) if num_classes is None else num_classes
    for path, part in zip(paths, parts, strict=True):
        if (wrong := np.flatnonzero(part.label >= limit)).size:
            rule = f"num_classes is {num_classes}"
            if num_classes is None:
                rule = "no more classes than examples"
            raise UserError(
                f"{_files(path)[-1]}: label {part.label[wrong[0]]} at record {wrong[0]}; expected "
                f"0 to {limit - 1}: {rule}"
            )
    return num_classes or max(int(part.label.max()) for part in parts) + 1

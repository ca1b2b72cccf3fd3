"""Two small image data sets that need no network: handwritten digits and Fashion-MNIST."""

import gzip
import importlib.util
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdp.data.files import digest, expand, reading
from jaxdp.data.source import Dataset, split
from jaxdp.errors import UserError

_DIGITS_HELDOUT = 360
_DIGITS_MEAN, _DIGITS_STD = 0.3053, 0.3760  # of the pixels in [0, 1]

FASHION_MNIST_FOLDER = "/usr/share/datasets/fashion-mnist"  # Debian's dataset-fashion-mnist
_FASHION_MEAN, _FASHION_STD = 0.2860, 0.3530
_FASHION_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "heldout": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True, eq=False)
class Images:
    """Images held as bytes, a quarter of float32, and standardised when they are read.

    Attributes:
      pixels: uint8 [n, height, width, channels], from 0 to `maximum`.
      label: int32 [n].
      maximum: the value of a white pixel.
      mean, std: of the pixels scaled to [0, 1].
    """

    pixels: np.ndarray
    label: np.ndarray
    maximum: int
    mean: float
    std: float

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        inputs = self.pixels[indices].astype(np.float32)
        inputs *= np.float32(1 / (self.maximum * self.std))
        inputs -= np.float32(self.mean / self.std)
        return {"inputs": inputs, "label": self.label[indices]}


def load_digits() -> Dataset:
    """1,797 handwritten digits of 8x8 pixels; 360 of them, by a fixed shuffle, are held out.

    Reads the file inside scikit-learn without importing it, which takes more than a second.

    References:
      E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (CC BY 4.0).
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError(
            "data kind digits reads scikit-learn's file, which is not installed: add it"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with reading(path, "scikit-learn's digits"), gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8, ndmin=2)
    if table.shape != (1797, 65) or table[:, :64].max() > 16 or table[:, 64].max() > 9:
        raise UserError(f"{path}: not the 1,797 digits; install scikit-learn again")
    train, heldout = (
        Images(
            table[chosen, :64].reshape(-1, 8, 8, 1),
            table[chosen, 64].astype(np.int32),
            16,
            _DIGITS_MEAN,
            _DIGITS_STD,
        )
        for chosen in split(len(table), _DIGITS_HELDOUT)
    )
    facts = {"path": str(path), "train": len(train), "heldout": len(heldout)}
    facts["sha256"] = digest(path)
    return Dataset("digits", "classification", train, heldout, 10, (8, 8, 1), facts)


def load_fashion_mnist(path: str | Path | None = None) -> Dataset:
    """Fashion-MNIST, or anything in its format: 60,000 + 10,000 images of 28x28 in ten classes.

    Args:
      path: a folder with the four IDX files, plain or .gz; Debian's by default.

    Raises:
      UserError: a missing, truncated or damaged file; a label that is no class.

    References:
      H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST, 2017 (arXiv:1708.07747).
    """
    folder = expand(path or FASHION_MNIST_FOLDER)
    files = {
        name: [_find(folder, stem) for stem in _FASHION_FILES[name]] for name in _FASHION_FILES
    }
    train, heldout = (_read_pair(*files[name]) for name in ("train", "heldout"))
    if train.pixels.shape[1:] != heldout.pixels.shape[1:]:
        raise UserError(
            f"{folder}: training images are {train.pixels.shape[1:3]}, held-out images "
            f"{heldout.pixels.shape[1:3]}; expected one size"
        )
    facts: dict[str, str | int] = {
        "path": str(folder),
        "train": len(train),
        "heldout": len(heldout),
        "sha256": digest(*files["train"], *files["heldout"]),
    }
    shape = train.pixels.shape[1:]
    return Dataset("fashion_mnist", "classification", train, heldout, 10, shape, facts)


def _find(folder: Path, stem: str) -> Path:
    for candidate in (folder / f"{stem}.gz", folder / stem):
        if os.path.exists(candidate):  # unlike Path.exists, False in a folder that may not be read
            return candidate
    raise UserError(
        f"{folder}: no file {stem}.gz or {stem}; run `apt-get install dataset-fashion-mnist`, "
        f"or give the folder of the four files as data.path"
    )


def _read_pair(images_path: Path, label_path: Path) -> Images:
    pixels, label = read_idx(images_path, 3), read_idx(label_path, 1)
    if len(pixels) != len(label):
        raise UserError(
            f"{label_path}: {len(label)} labels for the {len(pixels)} images of "
            f"{images_path.name}; expected one each; take both files from one release"
        )
    if (wrong := np.flatnonzero(label > 9)).size:
        raise UserError(
            f"{label_path}: label {label[wrong[0]]} at record {wrong[0]}; expected 0 to 9; "
            f"the file is damaged or of another data set"
        )
    return Images(pixels[..., None], label.astype(np.int32), 255, _FASHION_MEAN, _FASHION_STD)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """An IDX file of bytes, plain or .gz: uint8 with `ndim` dims, read-only.

    The format: two zero bytes, the type (8: unsigned byte), the number of dims, each dim as a
    big-endian uint32, the values.  Named in the MNIST database, Y. LeCun, C. Cortes, C. Burges.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with reading(path, "an IDX file"), opener(path, "rb") as file:
        content: bytes = file.read()
    header = 4 + 4 * ndim
    expected = bytes([0, 0, 8, ndim])
    if content[:4] != expected:
        raise UserError(
            f"{path}: starts with 0x{content[:4].hex()}; expected 0x{expected.hex()}, an IDX file "
            f"of unsigned bytes in {ndim} dims; it is damaged or of another kind"
        )
    if len(content) < header:
        raise UserError(f"{path}: ends after {len(content)} bytes; expected a header of {header}")
    shape = struct.unpack(f">{ndim}I", content[4:header])
    values = np.frombuffer(content, np.uint8, offset=header)
    if 0 in shape or values.size != math.prod(shape):
        record = max(1, math.prod(shape[1:]))
        raise UserError(
            f"{path}: {values.size} bytes of values, which end in record {values.size // record}; "
            f"the header says {shape[0]} records of {record} bytes; copy or download it again"
        )
    return values.reshape(shape)

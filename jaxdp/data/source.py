"""What a data set is: two random-access sources and what is known about them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from jaxdp.data.permutation import permute
from jaxdp.errors import UserError

_SPLIT_SEED = 0x5EED  # the split is part of the data set: the same whatever the seed of a run


class Source(Protocol):
    """Random access to examples; every batch is a function of the indices asked for.

    Classification: `{"inputs": float32 [b, *shape], "label": int32 [b]}`.
    Language: `{"tokens": int32 [b, context + 1]}`; target t is token t + 1.
    """

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        """The examples at `indices` (int64 [b], each in `range(len(self))`), leading dim b."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Training and held-out examples of one task.

    Attributes:
      name: the kind it was loaded as.
      task: "classification" or "language".
      train: examples to learn from.
      heldout: examples of the same form that never enter training.
      num_classes: the number of classes, or the size of the vocabulary.
      shape: one example's input: `(height, width, channels)`, `(features,)`, `(context,)`.
      facts: printed and recorded with a run: path, sizes, digest of the contents.
      bytes_per_token: to convert nats per token to bits per byte; None where it is unknown.
    """

    name: str
    task: Literal["classification", "language"]
    train: Source
    heldout: Source
    num_classes: int
    shape: tuple[int, ...]
    facts: Mapping[str, str | int] = field(default_factory=dict)
    bytes_per_token: float | None = None


@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class Subset:
    """The examples of `source` at `chosen` (int64 [m]), renumbered from 0."""

    source: Source
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return self.source[self.chosen[indices]]


def heldout_count(total: int, fraction: float, path: Path) -> int:
    """How many of the `total` records of `path` are held out: at least 1, leaving at least 1."""
    if not 0 < fraction < 1:
        raise UserError(
            f"heldout_fraction is {fraction}: give a number between 0 and 1, such as 0.05"
        )
    count = max(1, round(total * fraction))
    if count >= total:
        raise UserError(
            f"{path}: {count} of {total} records would be held out with heldout_fraction "
            f"{fraction}, which leaves none for training; give more data or another fraction"
        )
    return count


def split(total: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Divides `range(total)` by a fixed shuffle: (train, `count` held out), int64, each sorted.

    Shuffled because files are often sorted by label; sorted again for reads in file order.
    """
    order = permute(_SPLIT_SEED, 0, total, np.arange(total))
    return np.sort(order[count:]), np.sort(order[:count])

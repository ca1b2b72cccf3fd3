"""Batches as a function of (seed, step): nothing dropped, nothing padded, one shape.

    position p = step·B + i     epoch = p div n     example = perm(epoch)(p mod n)

The only state is the step, so that a resumed run, or one on another number of devices or processes,
sees the same stream.  Batches straddle epochs.
"""

from collections.abc import Iterator

import numpy as np

from jaxdp.data.permutation import permute
from jaxdp.data.source import Source
from jaxdp.errors import UserError

Rows = slice | np.ndarray  # row numbers within the global batch
_ALL = slice(None)
_BLOCK = 16384  # positions shuffled at a time: about 0.7 ms, once in many steps


class Loader:
    """The training stream of a source.  Safe to use from several threads.

    Attributes:
      source: the examples, n = len(source).
      global_batch: B, the examples per step over all devices and processes.
      seed: the order of examples is a function of it alone.
    """

    def __init__(self, source: Source, global_batch: int, seed: int):
        """Raises UserError where the source is empty or smaller than one batch."""
        if global_batch < 1:
            raise UserError(f"global batch is {global_batch}: give at least 1")
        if len(source) < global_batch:
            raise UserError(
                f"the training data hold {len(source)} examples and the global batch is "
                f"{global_batch}: give at least one batch of data, or a smaller global batch"
            )
        self.source = source
        self.global_batch = global_batch
        self.seed = seed
        self._size = len(source)
        self._steps_per_block = max(1, _BLOCK // global_batch)
        # (number, indices) of the last block, replaced as one value: a thread that reads it while
        # another replaces it has an old block or a new one, both right.
        self._block: tuple[int, np.ndarray] = (-1, np.empty((0, global_batch), np.int64))

    def indices(self, step: int, rows: Rows = _ALL) -> np.ndarray:
        """Which examples step `step` trains on.

        Args:
          step: >= 0, in any order; consecutive steps are cheapest.
          rows: a slice or an array of row numbers within the batch; all rows by default.

        Returns:
          int64 [rows], read-only.
        """
        if step < 0:
            raise ValueError(f"step is {step}; expected >= 0")
        number, offset = divmod(step, self._steps_per_block)
        cached, block = self._block
        if cached != number:
            block = self._shuffle(number)
            self._block = (number, block)
        return block[offset][rows]

    def batch(self, step: int, rows: Rows = _ALL) -> dict[str, np.ndarray]:
        """The examples of `indices(step, rows)`; each array has leading dim [rows]."""
        return self.source[self.indices(step, rows)]

    def epoch(self, step: int) -> int:
        """The epoch of the first example of `step`: how often all examples were seen before it."""
        return step * self.global_batch // self._size

    def _shuffle(self, number: int) -> np.ndarray:
        """Indices of the steps of block `number`, int64 [steps, B]."""
        shape = (self._steps_per_block, self.global_batch)
        start = number * shape[0] * shape[1]
        positions = np.arange(start, start + shape[0] * shape[1])
        epochs, offsets = np.divmod(positions, self._size)
        block = permute(self.seed, epochs, self._size, offsets).reshape(shape)
        block.flags.writeable = False  # rows are views of it
        return block


def eval_batches(
    source: Source, batch_size: int, rows: Rows = _ALL
) -> Iterator[dict[str, np.ndarray]]:
    """Every example once, in order, in batches of one shape.

    The last batch is filled up with example 0; `batch["weight"]`, float32 [b], is 1 for an example
    (or what the source itself gives as its weight) and 0 for a fill.

    Args:
      source: the examples.
      batch_size: b over all devices and processes.
      rows: which rows of each batch to load; all by default.

    Raises:
      UserError: an empty source, a batch size below 1.
    """
    if batch_size < 1:
        raise UserError(f"evaluation batch is {batch_size}: give at least 1")
    if len(source) == 0:
        raise UserError("the evaluation data hold 0 examples: give at least 1")
    return _eval_batches(source, batch_size, rows)


def _eval_batches(source: Source, batch_size: int, rows: Rows) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(source), batch_size):
        wanted = np.arange(start, start + batch_size)[rows]
        real = wanted < len(source)
        batch = dict(source[np.where(real, wanted, 0)])
        batch["weight"] = batch.get("weight", np.float32(1)) * real.astype(np.float32)
        yield batch

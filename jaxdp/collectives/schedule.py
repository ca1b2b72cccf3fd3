"""A collective as data: which rank sends which chunk to whom, round by round.

One value is executed on devices (`execute`), proved (`verify`) and run in NumPy (`simulate`).
A new algorithm is one function `n -> Schedule` and one row in `table`.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Result = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Transfer(NamedTuple):
    """One `lax.ppermute`: a partial permutation of ranks and the chunks that travel along it.

    Attributes:
      pairs: (source, destination) ranks; no rank is twice a source or twice a destination.
      chunks: for each pair, the chunk numbers its source sends; the same count for every pair.
      reduce: whether the destination combines what arrives with what it holds, or replaces it.
    """

    pairs: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, ...], ...]
    reduce: bool


Round = tuple[Transfer, ...]


@dataclass(frozen=True)
class Schedule:
    """A collective over `n` ranks that hold a vector cut into `chunks` equal pieces.

    All transfers of a round read what their sources held before the round.

    Attributes:
      n: number of ranks.
      chunks: number of pieces; a multiple of `n` for reduce_scatter and all_gather, where rank r
        owns pieces r*k to (r+1)*k - 1, k = chunks / n.
      rounds: the transfers, round by round.
      slot: `slot[rank][chunk]`, the position at which a rank keeps a chunk.  With a labelling
        relative to the rank (ring: rank - chunk) all ranks read and write the same slots in a
        round, so the compiled program addresses them statically and copies nothing.
      result: what holds at the end.
    """

    n: int
    chunks: int
    rounds: tuple[Round, ...]
    slot: tuple[tuple[int, ...], ...]
    result: Result

    def owned(self, rank: int) -> range:
        """The chunks that `rank` owns before an all-gather and after a reduce-scatter."""
        k = self.chunks // self.n
        return range(rank * k, (rank + 1) * k)

"""A collective as data: which rank sends which chunk to whom, round by round.

One value is executed on devices (`execute`), proved (`verify`), run in NumPy (`simulate`) and
priced (`cost`).  A new algorithm is one function `n -> Schedule` and one row in `table`.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Result = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


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
Slots = tuple[tuple[int, ...], ...]


# Compared by identity (eq=False): schedules are keys of caches, and hashing the half million
# numbers of a ring of 256 at each look-up took longer than compiling it.
@dataclass(frozen=True, eq=False)
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
      root: the rank whose vector a broadcast spreads.
    """

    n: int
    chunks: int
    rounds: tuple[Round, ...]
    slot: Slots
    result: Result
    root: int = 0

    @property
    def parts(self) -> tuple[int, int]:
        """Into how many parts, one per rank, a rank's input and its result are divided."""
        return (
            self.n if self.result == "reduce_scatter" else 1,
            self.n if self.result == "all_gather" else 1,
        )

    @property
    def grain(self) -> int:
        """Chunks per part: every part is padded to a multiple of it."""
        return self.chunks // (self.parts[0] * self.parts[1])

    def owned(self, rank: int) -> range:
        """The chunks that `rank` owns before an all-gather and after a reduce-scatter."""
        k = self.chunks // self.n
        return range(rank * k, (rank + 1) * k)

    def starts_with(self, rank: int) -> range:
        """The chunks whose value on `rank` matters before the first round."""
        if self.result == "all_gather":
            return self.owned(rank)
        return range(0 if self.result == "broadcast" and rank != self.root else self.chunks)

    def ends_with(self, rank: int) -> range:
        """The chunks that are part of the result on `rank`."""
        return self.owned(rank) if self.result == "reduce_scatter" else range(self.chunks)

    def contributors(self, chunk: int) -> range:
        """The ranks whose contribution belongs in a chunk of the result, once each."""
        if self.result == "broadcast":
            return range(self.root, self.root + 1)
        if self.result == "all_gather":
            owner = chunk * self.n // self.chunks
            return range(owner, owner + 1)
        return range(self.n)


def transfer(moves: Iterable[tuple[int, int, Iterable[int]]], *, reduce: bool) -> Transfer:
    """A transfer from (source, destination, chunks) triples."""
    moves = tuple(moves)
    pairs = tuple((source, destination) for source, destination, _ in moves)
    return Transfer(pairs, tuple(tuple(chunks) for *_, chunks in moves), reduce)


def same_slots(n: int, chunks: int) -> Slots:
    """Every rank keeps chunk c at slot c."""
    return (tuple(range(chunks)),) * n

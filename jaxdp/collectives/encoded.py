"""All-reduce of encoded vectors: what crosses ranks is always words of a codec.

A message holds a chunk of every vector, each by its own codec: gradients rounded, scalars exact,
in one collective.

    direct     each rank gets its chunk from all (all-to-all), decodes, sums in the order of the
               ranks, encodes the sum; all gather the words.  Two roundings, whatever n.
    gathered   each rank gets everything from all and sums itself: one rounding, n times the bytes.
    scheduled  an explicit algorithm whose every addition takes two encoded operands, the own one
               too, and encodes its sum: a rounding for each addition on the way.

All ranks end with the same words, so they agree to the bit.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.collectives.codec import Codec
from jaxdp.collectives.execute import execute, fence
from jaxdp.collectives.ops import get_op
from jaxdp.collectives.planning import planned_reduce_scatter, planned_schedule
from jaxdp.collectives.table import get_algorithm, make_schedule
from jaxdp.plan import Planned

# rows that add only what they have decoded; psum stands for the compiler's own collectives
DIRECT = ("psum", "all_to_all")


class Layout(NamedTuple):
    """Where the vectors are in a message.

    Attributes:
      codecs: of each vector, with one kind of word.
      lengths: values of each vector in one chunk, padded.
      chunks: messages into which the vectors are cut.
    """

    codecs: tuple[Codec, ...]
    lengths: tuple[int, ...]
    chunks: int

    @property
    def words(self) -> int:
        """Words of one message."""
        return sum(c.words(k) for c, k in zip(self.codecs, self.lengths, strict=True))

    def encode(self, vectors: Sequence[jax.Array]) -> jax.Array:
        """Vectors `[..., length]`, one of each, to messages `[..., words]`."""
        words = [codec.encode(x) for codec, x in zip(self.codecs, vectors, strict=True)]
        return jnp.concatenate(words, -1)

    def decode(self, message: jax.Array) -> list[jax.Array]:
        """The inverse of `encode`, but for what the codecs lose."""
        words = [c.words(k) for c, k in zip(self.codecs, self.lengths, strict=True)]
        cuts = [int(cut) for cut in np.cumsum(words)[:-1]]
        parts = jnp.split(message, cuts, -1)
        return [codec.decode(part) for codec, part in zip(self.codecs, parts, strict=True)]


def layout(sizes: Sequence[int], codecs: Sequence[Codec], algorithm: str, n: int) -> Layout:
    """How vectors of `sizes` are cut for an algorithm on `n` ranks."""
    if algorithm in DIRECT:
        chunks = n
    elif algorithm == "all_gather_sum":
        chunks = 1
    else:
        chunks = make_schedule(algorithm, "all_reduce", n).chunks
    lengths = tuple(
        -(-size // (chunks * codec.grain)) * codec.grain
        for size, codec in zip(sizes, codecs, strict=True)
    )
    return Layout(tuple(codecs), lengths, chunks)


def all_reduce_encoded(
    vectors: Sequence[jax.Array], codecs: Sequence[Codec], axis_name: str, algorithm: str
) -> list[jax.Array]:
    """The sum of every vector over all ranks, equal to the bit on all of them.

    Args:
      vectors: floating, one dimension each.
      codecs: one for each vector, all with the same kind of word.
      axis_name: the mesh axis.
      algorithm: "psum" or "all_to_all" (direct), "all_gather_sum", or a row with a schedule; the
        last only with codecs whose grain is 1.

    Returns:
      The sums, shaped as the vectors and of their dtypes.
    """
    n = lax.axis_size(axis_name)
    plan = layout([x.size for x in vectors], codecs, algorithm, n)
    messages = plan.encode(
        [_cut(x, k, plan.chunks) for x, k in zip(vectors, plan.lengths, strict=True)]
    )
    if algorithm in DIRECT:
        received = lax.all_to_all(messages, axis_name, 0, 0)
        messages = lax.all_gather(_sum_of_rows(plan, received, encode=True), axis_name)
        sums = plan.decode(messages)
    elif algorithm == "all_gather_sum":
        sums = _sum_of_rows(plan, lax.all_gather(messages[0], axis_name), encode=False)
    else:
        schedule = make_schedule(algorithm, "all_reduce", n)
        op = get_op("sum")._replace(combine=_add(plan))
        words = execute(schedule, messages.reshape(-1), axis_name, op)
        sums = plan.decode(words.reshape(messages.shape))
    return [s.reshape(-1)[: x.size].astype(x.dtype) for s, x in zip(sums, vectors, strict=True)]


def reduce_scatter_encoded(
    rows: jax.Array, codec: Codec, axis_name: str, algorithm: str
) -> jax.Array:
    """This rank's row of the sum over all ranks.

    Args:
      rows: `[n, k]`, floating; row r is for rank r.
      codec, axis_name, algorithm: as for `all_reduce_encoded`, "all_gather_sum" excepted; the
        algorithm has a reduce-scatter.

    Returns:
      `[k]`, of the dtype of `rows`, rounded on the way but not at the end.
    """
    n, k = rows.shape
    plan = Layout((codec,), (-(-k // codec.grain) * codec.grain,), n)
    messages = plan.encode([jnp.pad(rows, ((0, 0), (0, plan.lengths[0] - k)))])
    if algorithm in DIRECT:
        received = lax.all_to_all(messages, axis_name, 0, 0)
        (total,) = _sum_of_rows(plan, received, encode=False)
    else:
        schedule = make_schedule(algorithm, "reduce_scatter", n)
        op = get_op("sum")._replace(combine=_add(plan))
        (total,) = plan.decode(execute(schedule, messages.reshape(-1), axis_name, op))
    return total[:k].astype(rows.dtype)


def planned_reduce_scatter_encoded(
    name: str, part: int, codec: Codec, algorithm: str, n: int
) -> tuple[Planned, ...]:
    """The collectives of `reduce_scatter_encoded` on rows of `part` values."""
    words = codec.words(-(-part // codec.grain) * codec.grain)
    halves = "all_to_all" if algorithm in DIRECT else algorithm
    return planned_reduce_scatter(name, halves, words, codec.word.itemsize, n)


def planned_encoded(
    name: str, sizes: Sequence[int], codecs: Sequence[Codec], algorithm: str, n: int
) -> tuple[Planned, ...]:
    """The collectives of `all_reduce_encoded`."""
    plan = layout(sizes, codecs, algorithm, n)
    itemsize = codecs[0].word.itemsize
    nbytes = plan.words * itemsize
    if algorithm in DIRECT:
        return tuple(
            Planned(name, kind, 1, n * nbytes, (n - 1) * nbytes)
            for kind in ("all-to-all", "all-gather")
        )
    if algorithm == "all_gather_sum":
        return (Planned(name, "all-gather", 1, n * nbytes, (n - 1) * nbytes),)
    schedule = make_schedule(algorithm, "all_reduce", n)
    return planned_schedule(name, schedule, plan.words * plan.chunks, itemsize)


def can_carry(algorithm: str, codec: Codec) -> bool:
    """Whether an algorithm can run on encoded vectors of a codec."""
    if algorithm in (*DIRECT, "all_gather_sum"):
        return True
    return codec.grain == 1 and "all_reduce" in get_algorithm(algorithm).schedules


def _cut(x: jax.Array, length: int, chunks: int) -> jax.Array:
    return jnp.pad(x, (0, chunks * length - x.size)).reshape(chunks, length)


def _sum_of_rows(plan: Layout, messages: jax.Array, *, encode: bool):
    """The sum of one message of each rank, in the order of the ranks."""
    sums = [reduce(jnp.add, list(rows)) for rows in plan.decode(messages)]
    return plan.encode(sums) if encode else sums


def _add(plan: Layout) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Adds two messages of a schedule.

    The fence: a compiler that sees encode and decode of the own operand in one program may leave
    both out, and the ranks that received it cannot.
    """

    def combine(a: jax.Array, b: jax.Array) -> jax.Array:
        both = zip(plan.decode(a), plan.decode(b), strict=True)
        return plan.encode([fence(x) + fence(y) for x, y in both])

    return combine

"""What is measured, in the terms of nccl-tests.

    all_reduce       bytes = count * size           busbw = algbw * 2 (n - 1) / n
    reduce_scatter   bytes = n * count * size       busbw = algbw * (n - 1) / n
    all_gather       bytes = n * count * size       busbw = algbw * (n - 1) / n
    broadcast        bytes = count * size           busbw = algbw

`bytes` is the larger of a rank's input and output, `count` the elements of the smaller,
algbw = bytes / time, GB = 1e9.  busbw is the share of algbw that every link must carry, so that it
can be held against the hardware's, whatever n.

Reference: NVIDIA, nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.collectives import OPS, all_gather, all_reduce, broadcast, reduce_scatter
from jaxdp.collectives.schedule import Result
from jaxdp.mesh import AXIS

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(jnp.bfloat16),
    "float16": np.dtype(np.float16),
    "int32": np.dtype(np.int32),
}


class Case(NamedTuple):
    """One collective by one algorithm on one size.

    Attributes:
      op: "all_reduce", "reduce_scatter", "all_gather" or "broadcast".
      redop: "sum", "max", "min" or "product"; it matters to the first two only.
      algorithm: a row of the table.
      dtype: a key of `DTYPES`.
      sizes: elements of each array that a rank gives; several where a model's buckets are sent.
    """

    op: Result
    redop: str
    algorithm: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements that a rank gives, in all arrays together."""
        return sum(self.sizes)


def payload_bytes(case: Case, n: int) -> int:
    """The `bytes` of a case on `n` ranks."""
    given = case.count * DTYPES[case.dtype].itemsize
    return given * n if case.op == "all_gather" else given


def shown_count(case: Case, n: int) -> int:
    """The `count` of a case on `n` ranks."""
    return case.count // n if case.op == "reduce_scatter" else case.count


def bus_factor(op: Result, n: int) -> float:
    """busbw / algbw."""
    if op == "all_reduce":
        return 2 * (n - 1) / n
    return 1.0 if op == "broadcast" else (n - 1) / n


def elements(op: Result, nbytes: int, dtype: str, n: int) -> int:
    """Elements that a rank gives so that `bytes` is `nbytes`, or what comes next to it."""
    total = max(1, nbytes // DTYPES[dtype].itemsize)
    if op == "all_gather":
        return max(1, total // n)
    return max(1, total // n) * n if op == "reduce_scatter" else total


def body(case: Case) -> Callable[..., tuple[jax.Array, ...]]:
    """The collective on one rank's arrays, each `[1, size]`, as `on_mesh` calls it."""

    def collective(x: jax.Array) -> jax.Array:
        if case.op == "all_reduce":
            return all_reduce(x, AXIS, algorithm=case.algorithm, op=case.redop)
        if case.op == "reduce_scatter":
            return reduce_scatter(x, AXIS, algorithm=case.algorithm, op=case.redop)
        if case.op == "all_gather":
            return all_gather(x, AXIS, algorithm=case.algorithm)
        return broadcast(x, AXIS, algorithm=case.algorithm)

    return lambda *rows: tuple(collective(row[0])[None] for row in rows)


def random_input(case: Case, n: int, number: int, seed: int) -> np.ndarray:
    """Array `number` of every rank, `[n, size]`: random values whose reduction is exact.

    Small integers, which every dtype holds exactly with all their sums over n ranks.
    """
    rng = np.random.default_rng([seed, number])
    dtype = DTYPES[case.dtype]
    if case.redop == "product":  # a few factors of 2, so that no product leaves the mantissa
        values = np.where(rng.random((n, case.sizes[number])) < 0.5 / n, 2, 1)
        signs = rng.choice([-1, 1], values.shape)
        return (values * signs).astype(dtype)
    high = max(1, 2 ** (int(np.log2(_exact_integers(case.dtype))) - 1) // n)
    return rng.integers(-min(high, 100), min(high, 100) + 1, (n, case.sizes[number])).astype(dtype)


def _exact_integers(dtype: str) -> int:
    """Up to where all integers are exact."""
    return {"bfloat16": 2**8, "float16": 2**11}.get(dtype, 2**24)


def expected(case: Case, inputs: np.ndarray) -> np.ndarray:
    """What every rank should end with, `[n, ...]`, by NumPy in float64."""
    n = len(inputs)
    if case.op == "all_gather":
        return np.tile(inputs.reshape(1, -1), (n, 1))
    if case.op == "broadcast":
        return np.tile(inputs[:1], (n, 1))
    reduced = OPS[case.redop].numpy.reduce(inputs.astype(np.float64), axis=0)
    if case.op == "reduce_scatter":
        return reduced.reshape(n, -1)
    return np.tile(reduced, (n, 1))

"""PowerSGD: a gradient matrix travels as two thin factors, which can be added on the way.

    M                                [m, c]: a device's gradient, all dims but the last as rows
    P = sum over devices of M Q      [m, r]: one reduction for all leaves; then made orthonormal
    Q = sum over devices of M^T P    [c, r]: the same
    P Q^T                            stands for the sum of M; a device left out M - P (M^T P)^T

That is one step of a power iteration on the sum, which begins where the last one ended: Q is kept.
Leaves for which r (m + c) is not below m c, vectors among them, travel exactly.

Reference: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", NeurIPS 2019.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.collectives import algorithms_for
from jaxdp.errors import UserError
from jaxdp.plan import Planned
from jaxdp.sync.carriers import carrier_of
from jaxdp.sync.feedback import Compressor, Leaves, error_feedback
from jaxdp.sync.types import GradSync
from jaxdp.types import PyTree

_SMALL = 1e-5  # what is left of a column of norm 1: rounding, not a direction


def power_sgd_sync(rank: int = 4, *, algorithm: str = "psum") -> GradSync:
    """Sums gradient matrices by factors of a low rank, with error feedback; all else exactly.

    Args:
      rank: columns of the factors.
      algorithm: a row of `jaxdp.collectives.ALGORITHMS`, for all reductions.

    Raises:
      UserError: the rank is below 1, or there is no such algorithm.
    """
    if not isinstance(rank, int) or rank < 1:
        raise UserError(f"rank: {rank}; expected a whole number of at least 1")
    if algorithm not in (have := algorithms_for("all_reduce")):
        raise UserError(f"algorithm: {algorithm} is not known; expected one of {', '.join(have)}")
    carrier = carrier_of(algorithm)

    def init(leaves: Leaves) -> tuple[jax.Array, ...]:
        keys = (jax.random.fold_in(jax.random.key(0), i) for i in range(len(leaves)))
        drawn = (
            jax.random.normal(key, (leaf.shape[-1], rank), leaf.dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        )
        return tuple(_units(q, q) for q in drawn)

    def reduce(
        leaves: Leaves, start: Sequence[jax.Array], axis_name: str
    ) -> tuple[Leaves, Leaves, PyTree]:
        matrices = [x.reshape(-1, x.shape[-1]) for x in leaves]
        own = [_product(m, q) for m, q in zip(matrices, start, strict=True)]
        ps = [orthonormal(p) for p in carrier.run("factors P", own, axis_name)]
        own = [_product(m.T, p) for m, p in zip(matrices, ps, strict=True)]
        qs = carrier.run("factors Q", own, axis_name)
        summed = [_product(p, q.T) for p, q in zip(ps, qs, strict=True)]
        left = [m - _product(p, q.T) for m, p, q in zip(matrices, ps, own, strict=True)]
        start = tuple(_units(q, before) for q, before in zip(qs, start, strict=True))
        return _shaped(summed, leaves), _shaped(left, leaves), start

    def plan(leaves: Leaves, n: int) -> tuple[Planned, ...]:
        p, q = (
            [
                jax.ShapeDtypeStruct((side, rank), x.dtype)
                for x, side in zip(leaves, of, strict=True)
            ]
            for of in zip(*map(_sides, leaves), strict=True)
        )
        return (*carrier.plan("factors P", p, n), *carrier.plan("factors Q", q, n))

    def fits(leaf: Any) -> bool:
        rows, columns = _sides(leaf)
        return leaf.ndim > 1 and rank * (rows + columns) < leaf.size

    return error_feedback(Compressor(fits, init, reduce, plan), algorithm)


def orthonormal(p: jax.Array) -> jax.Array:
    """Orthonormal columns that span those of `p`; zero where a column adds no direction.

    Gram-Schmidt, each column twice, which is enough for float32.  Every device runs it on the same
    bits; no library's QR, whose threads may add in another order.

    Args:
      p: `[m, r]`.
    """

    def column(j: jax.Array, basis: jax.Array) -> jax.Array:
        x = _unit(lax.dynamic_index_in_dim(p, j, 1, keepdims=False))
        for _ in range(2):
            x = x - _product(basis, _product(basis.T, x))
        x = jnp.where(jnp.sqrt((x**2).sum()) > _SMALL, _unit(x), 0)
        return lax.dynamic_update_index_in_dim(basis, x, j, 1)

    return lax.fori_loop(0, p.shape[1], column, jnp.zeros_like(p))


def _units(columns: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Columns of norm 1; of `otherwise` where one is zero, which would stay zero for ever."""
    largest = jnp.abs(columns).max(0, keepdims=True)
    alive = largest > jnp.finfo(columns.dtype).tiny
    scaled = columns / jnp.where(alive, largest, 1)
    norms = jnp.sqrt((scaled**2).sum(0, keepdims=True))
    return jnp.where(alive, scaled / jnp.where(alive, norms, 1), otherwise)


def _unit(x: jax.Array) -> jax.Array:
    """A vector of norm 1, or of zeros; scaled first, since squares of small gradients are zero."""
    return _units(x[:, None], jnp.zeros_like(x)[:, None])[:, 0]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # accelerators multiply float32 in fewer bits unless told not to: residuals would be wrong
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _shaped(matrices: Leaves, like: Leaves) -> list[jax.Array]:
    return [m.reshape(x.shape) for m, x in zip(matrices, like, strict=True)]


def _sides(leaf: Any) -> tuple[int, int]:
    """Rows and columns of a leaf as a matrix; no columns where it has no dims."""
    columns = leaf.shape[-1] if leaf.ndim else 0
    return leaf.size // max(columns, 1), columns

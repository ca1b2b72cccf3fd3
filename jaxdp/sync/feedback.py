"""Error feedback: what a compression leaves out is kept, and added to the next step's gradients.

    v    = s + W e          s: this device's gradient sums; W: global weight; e: its residual
    sent = compressed(v)    what enters the sum over devices
    e'   = (v - sent) / W

The residual is in units of the mean gradient, since the step divides by its own weight: kept as a
sum, it would count for more in a light step than in the heavy one it is from.  So, whatever the
weights,

    sum of the applied mean gradients + residuals of all devices = sum of the true mean gradients.

The price is that W is known before anything is compressed: scalars, model state and the gradients
that are not compressed are reduced first, exactly.  A flag travels with them, since a compression
may leave a NaN behind: one device's NaN makes the step non-finite on all.

The residual passes by the optimizer's schedule: it is applied with the rate of the step it is sent
in.

Reference: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018;
S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.plan import Plan, Planned
from jaxdp.sync.buckets import plan_buckets
from jaxdp.sync.carriers import Carrier, carrier_of
from jaxdp.sync.types import GradSync, Sums
from jaxdp.types import PyTree

Leaves = Sequence[Any]


class Compressor(NamedTuple):
    """A lossy sum over devices.

    Attributes:
      fits: a leaf, or its shape -> whether it is compressed; the others are summed exactly.
      init: the leaves that fit -> where it starts from, equal on all devices.
      reduce: (this device's leaves, start, axis_name) -> (their sums over devices, equal to the bit
        on all; what this device left out of its own; the next step's start).
      plan: (leaves or shapes, n) -> the collectives of `reduce`.
    """

    fits: Callable[[Any], bool]
    init: Callable[[Leaves], PyTree]
    reduce: Callable[[Leaves, PyTree, str], tuple[Leaves, Leaves, PyTree]]
    plan: Callable[[Leaves, int], tuple[Planned, ...]]


def error_feedback(compressor: Compressor, algorithm: str = "psum") -> GradSync:
    """A synchronisation whose gradients are compressed, and nothing else.

    The state of a device is {"residual": shaped as the parameters, None where a leaf is not
    compressed, of at least float32; "start": the compressor's}.  On one device nothing travels, and
    nothing is left out: a residual that a checkpoint brought is applied whole.

    Args:
      compressor: from `top_k` or `power_sgd`.
      algorithm: of the all-reduce of what stays exact: a row of `jaxdp.collectives.ALGORITHMS`.
    """
    carrier = carrier_of(algorithm)

    def init(params: PyTree) -> PyTree:
        leaves = jax.tree.leaves(params)
        dtype, fitting = _dtype(leaves), [p for p in leaves if compressor.fits(p)]
        residual = jax.tree.map(
            lambda p: jnp.zeros(p.shape, dtype) if compressor.fits(p) else None, params
        )
        return {"residual": residual, "start": compressor.init(_as(dtype, fitting))}

    def update(sums: Sums, state: PyTree, axis_name: str) -> tuple[Sums, PyTree]:
        alone = lax.axis_size(axis_name) == 1
        lossy, exact, together = _split(compressor, sums)
        others = [*exact, _flag(lossy, _dtype(jax.tree.leaves(sums["grads"])))]
        *exact, flag = others if alone else _exact_sums(carrier, others, axis_name)
        weight = together(lossy, exact)["scalars"]["loss"][1]
        residual, structure = jax.tree.flatten(state["residual"])
        owed = [g.astype(e.dtype) + weight * e for g, e in zip(lossy, residual, strict=True)]
        if alone or not owed:
            summed, left, start = owed, [jnp.zeros_like(v) for v in owed], state["start"]
        else:
            summed, left, start = compressor.reduce(owed, state["start"], axis_name)
        divisor = jnp.where(weight > 0, weight, 1)
        summed = [
            jnp.where(flag == 0, v, jnp.nan).astype(g.dtype)
            for v, g in zip(summed, lossy, strict=True)
        ]
        residual = jax.tree.unflatten(structure, [v / divisor for v in left])
        return together(summed, exact), {"residual": residual, "start": start}

    def plan(sums: Sums, n: int) -> Plan:
        lossy, exact, _ = _split(compressor, sums)
        dtype = _dtype(jax.tree.leaves(sums["grads"]))
        if n == 1:
            return Plan()
        others = [*exact, jax.ShapeDtypeStruct((), dtype)]
        found = [
            planned
            for numbers in _exact_buckets(others)
            for planned in carrier.plan("exact bucket", [others[i] for i in numbers], n)
        ]
        shapes = [jax.ShapeDtypeStruct(g.shape, dtype) for g in lossy]
        return Plan((*found, *(compressor.plan(shapes, n) if shapes else ())))

    return GradSync(init, update, plan, respread=respread)


def respread(state: PyTree, n: int) -> PyTree:
    """The states of one number of devices for another, on the host.

    What all devices together still owe is kept: each of the new ones owes an equal part of it.

    Args:
      state: leaves `[devices before, ...]`.
      n: devices now.

    Returns:
      The same with leaves `[n, ...]`.
    """

    def shared(x: Any) -> np.ndarray:
        part = np.sum(np.asarray(x), axis=0, dtype=np.float64) / n
        return np.broadcast_to(part.astype(x.dtype), (n, *part.shape))

    def first(x: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(x)[0], (n, *x.shape[1:]))

    return {
        "residual": jax.tree.map(shared, state["residual"]),
        "start": jax.tree.map(first, state["start"]),
    }


def _split(compressor: Compressor, sums: Sums) -> tuple[Leaves, Leaves, Callable[..., Sums]]:
    """(gradients that are compressed, all other leaves, both -> the sums)."""
    grads, of_grads = jax.tree.flatten(sums["grads"])
    others, of_others = jax.tree.flatten({k: v for k, v in sums.items() if k != "grads"})
    fits = [compressor.fits(g) for g in grads]
    lossy = [g for g, fit in zip(grads, fits, strict=True) if fit]
    exact = [g for g, fit in zip(grads, fits, strict=True) if not fit]

    def together(lossy: Leaves, rest: Leaves) -> Sums:
        exact, others = rest[: len(fits) - len(lossy)], rest[len(fits) - len(lossy) :]
        from_lossy, from_exact = iter(lossy), iter(exact)
        leaves = [next(from_lossy if fit else from_exact) for fit in fits]
        return {
            **jax.tree.unflatten(of_others, others),
            "grads": jax.tree.unflatten(of_grads, leaves),
        }

    return lossy, [*exact, *others], together


def _flag(leaves: Leaves, dtype: Any) -> jax.Array:
    """0, or NaN if a value is not finite: its sum over devices is 0 only if all are."""
    finite = jnp.asarray([jnp.isfinite(x).all() for x in leaves], bool).all()
    return jnp.where(finite, 0, jnp.nan).astype(dtype)


def _exact_sums(carrier: Carrier, leaves: Leaves, axis_name: str) -> list[Any]:
    found = list(leaves)
    for numbers in _exact_buckets(leaves):
        summed = carrier.run("exact bucket", [leaves[i] for i in numbers], axis_name)
        for i, leaf in zip(numbers, summed, strict=True):
            found[i] = leaf
    return found


def _exact_buckets(leaves: Leaves) -> list[tuple[int, ...]]:
    """Numbers of leaves, one bucket for each dtype."""
    return [b.leaves for b in plan_buckets(leaves) if any(leaves[i].size for i in b.leaves)]


def _dtype(leaves: Leaves) -> Any:
    """In which gradients are compressed and residuals kept."""
    return jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves))


def _as(dtype: Any, leaves: Leaves) -> list[Any]:
    return [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf in leaves]

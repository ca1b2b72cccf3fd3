"""Precision on the wire: gradients cross devices in fewer bits than they are computed in.

    algorithm                            bfloat16, float16            int8
    psum, psum_scatter_gather            the compiler adds them       psum: as all_to_all
    all_to_all, all_gather_sum           encoded, added in float32    encoded, added in float32
    a schedule (ring, tree, ..)          each sum is encoded anew     refused

Scalars and model state stay exact: in the same messages where they are encoded, in a reduction of
their own where the compiler adds, since one reduction of its has one dtype.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.collectives.codec import CODECS, Codec, exact, power_of_two
from jaxdp.collectives.encoded import all_reduce_encoded, can_carry, planned_encoded
from jaxdp.errors import UserError
from jaxdp.plan import Planned
from jaxdp.sync.buckets import join, part
from jaxdp.sync.carriers import Carrier, Leaves

WIRES = ("float32", *CODECS)


def check_wire(algorithm: str, wire: str) -> None:
    """Raises UserError if there is no such wire, or the algorithm cannot carry it."""
    if wire not in WIRES:
        raise UserError(f"wire: {wire!r} is not known; expected one of {', '.join(WIRES)}")
    if wire == "int8" and (algorithm == "auto" or not can_carry(algorithm, CODECS[wire](2))):
        raise UserError(
            f"wire: int8 cannot be added on the way, as {algorithm} does; expected algorithm psum, "
            "all_to_all or all_gather_sum"
        )


def compiler_adds(algorithm: str, wire: str) -> bool:
    """Whether only a dtype can be chosen: the compiler's own reduction does the adding."""
    own = algorithm in ("psum", "psum_scatter_gather")
    return own and not (algorithm == "psum" and wire == "int8")


def cast(carrier: Carrier, wire: str, n: int) -> Carrier:
    """`carrier` on leaves that are cast before and after; float16 divided by n, as its codec."""
    divisor = power_of_two(n) if wire == "float16" else 1

    def run(name: str, leaves: Leaves, axis_name: str) -> list[jax.Array]:
        narrow = [(x / jnp.asarray(divisor, x.dtype)).astype(wire) for x in leaves]
        summed = carrier.run(name, narrow, axis_name)
        return [
            y.astype(x.dtype) * jnp.asarray(divisor, x.dtype)
            for x, y in zip(leaves, summed, strict=True)
        ]

    def plan(name: str, leaves: Leaves, n: int) -> tuple[Planned, ...]:
        return carrier.plan(name, [jax.ShapeDtypeStruct(x.shape, wire) for x in leaves], n)

    return Carrier(run, plan)


def encoded(algorithm: str, wire: str, n: int, rounded: int) -> Carrier:
    """Messages of a codec; the first `rounded` leaves by the wire's, the others exactly."""
    codec = CODECS[wire](n)

    def run(name: str, leaves: Leaves, axis_name: str) -> list[jax.Array]:
        groups = _groups(leaves, rounded)
        vectors = [join([leaves[i] for i in numbers]) for numbers in groups]
        codecs = _codecs(leaves, groups, codec)
        sums = all_reduce_encoded(vectors, codecs, axis_name, algorithm)
        found = list(leaves)
        for numbers, vector in zip(groups, sums, strict=True):
            for i, leaf in zip(numbers, part(vector, [leaves[i] for i in numbers]), strict=True):
                found[i] = leaf
        return found

    def plan(name: str, leaves: Leaves, n: int) -> tuple[Planned, ...]:
        groups = _groups(leaves, rounded)
        sizes = [sum(leaves[i].size for i in numbers) for numbers in groups]
        return planned_encoded(name, sizes, _codecs(leaves, groups, codec), algorithm, n)

    return Carrier(run, plan)


def _groups(leaves: Leaves, rounded: int) -> list[list[int]]:
    """Numbers of leaves per vector: those that are rounded, then the others dtype by dtype."""
    by_dtype: dict[Any, list[int]] = {}
    for i in range(rounded, len(leaves)):
        by_dtype.setdefault(jnp.dtype(leaves[i].dtype), []).append(i)
    return [list(range(rounded)), *by_dtype.values()]


def _codecs(leaves: Leaves, groups: Sequence[list[int]], codec: Codec) -> list[Codec]:
    return [codec, *(exact(leaves[numbers[0]].dtype, codec.word) for numbers in groups[1:])]

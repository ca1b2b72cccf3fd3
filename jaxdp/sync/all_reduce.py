"""All-reduce of everything a step sums: in buckets, by any algorithm, in any wire format."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxdp.collectives import get_algorithm, tuning
from jaxdp.errors import UserError
from jaxdp.plan import Plan
from jaxdp.sync.buckets import Bucket, add_riders, plan_buckets
from jaxdp.sync.carriers import (
    NO_COMBINER,
    Carrier,
    carrier_of,
    psum_as_they_are,
    psum_per_bucket,
)
from jaxdp.sync.types import GradSync, Sums
from jaxdp.sync.wire import cast, check_wire, compiler_adds, encoded
from jaxdp.trees import count_bytes
from jaxdp.types import PyTree


class Options(NamedTuple):
    """The arguments of `all_reduce_sync`."""

    algorithm: str
    bucket_bytes: int | None
    first_bucket_bytes: int | None
    wire: str


Order = tuple[int, ...] | None  # of the sums' leaves, as they become ready


class Reduction(NamedTuple):
    """Leaves, as numbers in JAX's order of the sums, and the way in which they are summed."""

    name: str
    leaves: tuple[int, ...]
    carrier: Carrier


def all_reduce_sync(
    algorithm: str = "psum",
    *,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
    wire: str = "float32",
) -> GradSync:
    """Sums every leaf over all devices.

    Args:
      algorithm: a row of `jaxdp.collectives.ALGORITHMS`, or "auto" (see `all_reduce`), which is
        chosen bucket by bucket (a run of `jaxdp.train` chooses once, before the step is built).
      bucket_bytes, first_bucket_bytes: the most gradient bytes of a bucket, before encoding, and of
        the first one; see `plan_buckets`.  None: one bucket per dtype.  Leaves come in the order in
        which their gradients are ready, which the step finds out.
      wire: "float32" (gradients as they are), "bfloat16", "float16" or "int8": see `sync.wire`.  On
        one device nothing travels, and nothing is rounded.

    Raises:
      UserError: there is no such algorithm or wire, they do not go together, or a size is out of
        range.
    """
    options = Options(algorithm, bucket_bytes, first_bucket_bytes, wire)
    _check(options)

    def update(
        sums: Sums, state: PyTree, axis_name: str, *, order: Order = None
    ) -> tuple[Sums, PyTree]:
        leaves, structure = jax.tree.flatten(sums)
        for name, numbers, carrier in _reductions(options, sums, lax.axis_size(axis_name), order):
            summed = carrier.run(name, [leaves[i] for i in numbers], axis_name)
            for i, leaf in zip(numbers, summed, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves), state

    def plan(sums: Sums, n: int, *, order: Order = None) -> Plan:
        leaves = jax.tree.leaves(sums)
        reductions = _reductions(options, sums, n, order)
        found = (r.carrier.plan(r.name, [leaves[i] for i in r.leaves], n) for r in reductions)
        return Plan(tuple(planned for group in found for planned in group))

    def compiler_options(platform: str) -> dict[str, str]:
        planned_apart = bucket_bytes is not None or wire != "float32"
        return NO_COMBINER if platform == "cpu" and planned_apart else {}

    return GradSync(
        lambda params: (), update, plan, compiler_options, takes_order=bucket_bytes is not None
    )


def _reductions(options: Options, sums: Sums, n: int, order: Order) -> list[Reduction]:
    """Every leaf of the sums in one reduction, except empty ones."""
    leaves, structure = jax.tree.flatten(sums)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    if options.wire == "float32":
        return _lossless(options, leaves, numbers, n, order)
    return [] if n == 1 else _lossy(options, leaves, numbers, n, order)


def _lossless(
    options: Options, leaves: list[Any], numbers: Sums, n: int, order: Order
) -> list[Reduction]:
    buckets = _buckets(options, leaves, (numbers["grads"], numbers["model_state"]), order)
    found = []
    for k, bucket in enumerate(add_riders(buckets, leaves, jax.tree.leaves(numbers["scalars"]))):
        if nbytes := _nbytes(leaves, bucket.leaves):
            carrier = _carrier(options, _algorithm(options, nbytes, n))
            found.append(Reduction(f"bucket {k}", bucket.leaves, carrier))
    return found


def _lossy(
    options: Options, leaves: list[Any], numbers: Sums, n: int, order: Order
) -> list[Reduction]:
    """Gradients rounded; the rest exact, in the first bucket's messages where there are any."""
    found = []
    others = tuple(jax.tree.leaves((numbers["model_state"], numbers["scalars"])))
    for k, bucket in enumerate(_buckets(options, leaves, numbers["grads"], order)):
        if not (nbytes := _nbytes(leaves, bucket.leaves)):
            continue
        algorithm, name = _algorithm(options, nbytes, n), f"bucket {k}"
        if compiler_adds(algorithm, options.wire):
            carrier = cast(_carrier(options, algorithm), options.wire, n)
            found.append(Reduction(name, bucket.leaves, carrier))
        else:
            carrier = encoded(algorithm, options.wire, n, rounded=len(bucket.leaves))
            found.append(Reduction(name, (*bucket.leaves, *others), carrier))
            others = ()
    for bucket in _buckets(options._replace(bucket_bytes=None), leaves, others):
        found.append(Reduction("exact bucket", bucket.leaves, psum_per_bucket()))
    return found


def _buckets(
    options: Options, leaves: list[Any], numbers: PyTree, order: Order = None
) -> list[Bucket]:
    """`plan_buckets` of the leaves that are numbered, with these numbers."""
    flat = jax.tree.leaves(numbers)
    first = options.first_bucket_bytes if options.bucket_bytes is not None else None
    if order is not None:
        order = tuple(flat.index(i) for i in order if i in flat)
    planned = plan_buckets([leaves[i] for i in flat], options.bucket_bytes, first, order)
    return [b._replace(leaves=tuple(flat[i] for i in b.leaves)) for b in planned]


def _carrier(options: Options, algorithm: str) -> Carrier:
    one_bucket = options.bucket_bytes is None and options.wire == "float32"
    if algorithm == "psum" and one_bucket:
        return psum_as_they_are()
    return carrier_of(algorithm)


def _algorithm(options: Options, nbytes: int, n: int) -> str:
    if options.algorithm == "auto":
        return tuning.choose(nbytes, n).algorithm
    return options.algorithm


def _nbytes(leaves: list[Any], numbers: Iterable[int]) -> int:
    return count_bytes([leaves[i] for i in numbers])


def _check(options: Options) -> None:
    if options.algorithm != "auto":
        get_algorithm(options.algorithm)
    check_wire(options.algorithm, options.wire)
    cap, first = options.bucket_bytes, options.first_bucket_bytes
    for name, size in (("bucket_bytes", cap), ("first_bucket_bytes", first)):
        if size is not None and size < 1:
            raise UserError(f"{name}: {size}; expected at least 1, or None")
    if first is not None and (cap is None or first > cap):
        raise UserError(
            f"first_bucket_bytes: {first} with bucket_bytes {cap}; expected no more than "
            "bucket_bytes, and none without it"
        )

"""All-reduce of everything a step sums, in buckets, by any algorithm."""

from typing import NamedTuple

import jax
from jax import lax

from jaxdp.collectives import get_algorithm, tuning
from jaxdp.errors import UserError
from jaxdp.plan import Plan
from jaxdp.sync.buckets import add_riders, plan_buckets
from jaxdp.sync.carriers import (
    NO_COMBINER,
    Carrier,
    by_algorithm,
    psum_as_they_are,
    psum_per_bucket,
)
from jaxdp.sync.types import GradSync, Sums, no_options
from jaxdp.trees import count_bytes
from jaxdp.types import PyTree


class Reduction(NamedTuple):
    """A bucket and the way in which it is summed; `leaves` are numbers in the order of the sums."""

    name: str
    leaves: tuple[int, ...]
    carrier: Carrier


def all_reduce_sync(
    algorithm: str = "psum",
    *,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
) -> GradSync:
    """Sums every leaf over all devices.

    Args:
      algorithm: a row of `jaxdp.collectives.ALGORITHMS`, or "auto" (see `all_reduce`), which is
        chosen bucket by bucket.
      bucket_bytes, first_bucket_bytes: the most gradient bytes of a bucket, and of the first one;
        see `plan_buckets`.  None: one bucket per dtype.

    Raises:
      UserError: there is no such algorithm, or a size is out of range.
    """
    if algorithm != "auto":
        get_algorithm(algorithm)
    _check_sizes(bucket_bytes, first_bucket_bytes)

    def reductions(sums: Sums, n: int) -> list[Reduction]:
        leaves, structure = jax.tree.flatten(sums)
        number = jax.tree.unflatten(structure, range(len(leaves)))
        large = {"grads": sums["grads"], "model_state": sums["model_state"]}
        numbers = jax.tree.leaves({name: number[name] for name in large})
        buckets = [
            bucket._replace(leaves=tuple(numbers[i] for i in bucket.leaves))
            for bucket in plan_buckets(large, bucket_bytes, first_bucket_bytes)
        ]
        found = []
        for k, bucket in enumerate(add_riders(buckets, leaves, jax.tree.leaves(number["scalars"]))):
            if nbytes := count_bytes([leaves[i] for i in bucket.leaves]):
                carrier = _carrier(algorithm, nbytes, n, bucketed=bucket_bytes is not None)
                found.append(Reduction(f"bucket {k}", bucket.leaves, carrier))
        return found

    def update(sums: Sums, state: PyTree, axis_name: str) -> tuple[Sums, PyTree]:
        leaves, structure = jax.tree.flatten(sums)
        for name, numbers, carrier in reductions(sums, lax.axis_size(axis_name)):
            summed = carrier.run(name, [leaves[i] for i in numbers], axis_name)
            for i, leaf in zip(numbers, summed, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves), state

    def plan(sums: Sums, n: int) -> Plan:
        leaves = jax.tree.leaves(sums)
        return Plan(
            tuple(
                planned
                for name, numbers, carrier in reductions(sums, n)
                for planned in carrier.plan(name, [leaves[i] for i in numbers], n)
            )
        )

    def compiler_options(platform: str) -> dict[str, str]:
        return NO_COMBINER if platform == "cpu" else {}

    options = no_options if bucket_bytes is None else compiler_options
    return GradSync(lambda params: (), update, plan, options)


def _carrier(algorithm: str, nbytes: int, n: int, *, bucketed: bool) -> Carrier:
    if algorithm == "auto":
        algorithm = tuning.choose(nbytes, n).algorithm
    if algorithm != "psum":
        return by_algorithm(algorithm)
    return psum_per_bucket() if bucketed else psum_as_they_are()


def _check_sizes(bucket_bytes: int | None, first_bucket_bytes: int | None) -> None:
    for name, size in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if size is not None and size < 1:
            raise UserError(f"{name}: {size}; expected at least 1, or None")
    if first_bucket_bytes is not None and (
        bucket_bytes is None or first_bucket_bytes > bucket_bytes
    ):
        raise UserError(
            f"first_bucket_bytes: {first_bucket_bytes} with bucket_bytes {bucket_bytes}; expected "
            "no more than bucket_bytes, and none without it"
        )

"""Ways to sum a bucket over devices, each with the collectives that it becomes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxdp.collectives import all_reduce
from jaxdp.collectives.planning import planned_all_reduce
from jaxdp.plan import Planned
from jaxdp.sync.buckets import joined

Leaves = Sequence[Any]


class Carrier(NamedTuple):
    """A way to sum a bucket.

    Attributes:
      run: (name, leaves, axis_name) -> their sums over the axis.
      plan: (name, leaves or shapes, n) -> the collectives of `run`.
    """

    run: Callable[[str, Leaves, str], list[jax.Array]]
    plan: Callable[[str, Leaves, int], tuple[Planned, ...]]


def psum_as_they_are() -> Carrier:
    """psum without a copy; the compiler joins and cuts as it sees fit."""
    return Carrier(
        lambda name, leaves, axis: list(lax.psum(tuple(leaves), axis)), partial(_plan, "psum")
    )


def psum_per_bucket() -> Carrier:
    """psum whose buckets survive the compiler.

    GPU and TPU combine exactly the all-reduces of one `combiner_key`, without a copy.  XLA:CPU does
    not read it: there the bucket is concatenated, and `NO_COMBINER` keeps buckets apart.  With
    leaves left single, every leaf would be an all-reduce of its own; a true dependence between
    buckets was slower, and a barrier is removed before jax 0.12.
    """

    def run(name: str, leaves: Leaves, axis_name: str) -> list[jax.Array]:
        def keyed(*leaves: jax.Array) -> list[jax.Array]:
            with set_xla_metadata(combiner_key=name):
                return list(lax.psum(leaves, axis_name))

        def single(*leaves: jax.Array) -> list[jax.Array]:
            return joined(lambda vector: lax.psum(vector, axis_name), leaves)

        return lax.platform_dependent(*leaves, cpu=single, default=keyed)

    return Carrier(run, partial(_plan, "psum"))


def by_algorithm(algorithm: str) -> Carrier:
    """One concatenated vector, so that an algorithm's messages are paid once, not once per leaf."""

    def run(name: str, leaves: Leaves, axis_name: str) -> list[jax.Array]:
        return joined(lambda vector: all_reduce(vector, axis_name, algorithm=algorithm), leaves)

    return Carrier(run, partial(_plan, algorithm))


def carrier_of(algorithm: str) -> Carrier:
    """A bucket in one reduction of its own, by an algorithm."""
    return psum_per_bucket() if algorithm == "psum" else by_algorithm(algorithm)


# What keeps all-reduces apart on XLA:CPU; there is no option of that pass's own.
NO_COMBINER = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


def _plan(algorithm: str, name: str, leaves: Leaves, n: int) -> tuple[Planned, ...]:
    size = sum(leaf.size for leaf in leaves)
    return planned_all_reduce(name, algorithm, size, leaves[0].dtype.itemsize, n)

"""The table of algorithms: one row each; tests, configuration and comparison read it.

A collective of a row is a schedule, or a function of the compiler's collectives; everything else
treats them alike.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from numbers import Integral
from types import MappingProxyType
from typing import NamedTuple

import jax

from jaxdp.collectives import (
    bidirectional_ring,
    builtin,
    double_tree,
    doubling,
    hierarchical,
    naive,
    ring,
    tree,
)
from jaxdp.collectives.execute import execute
from jaxdp.collectives.ops import Op
from jaxdp.collectives.schedule import Result, Schedule
from jaxdp.errors import UserError

Factory = Callable[..., Schedule]  # (n, *, options) -> Schedule
Function = Callable[..., jax.Array]  # (array, axis name, op, *, options) -> array

_NONE: Mapping[Result, Callable] = MappingProxyType({})


class Algorithm(NamedTuple):
    """A way to communicate, in the collectives it is made for.

    Attributes:
      about: one line for tables.
      schedules: collective -> factory of schedules; its keyword arguments are the options.
      functions: collective -> function to call inside `shard_map`, where there is no schedule.
    """

    about: str
    schedules: Mapping[Result, Factory] = _NONE
    functions: Mapping[Result, Function] = _NONE


ALGORITHMS: dict[str, Algorithm] = {
    "psum": Algorithm(
        "the compiler's own (NCCL on GPUs, ICI on TPUs)",
        functions={
            "all_reduce": builtin.all_reduce,
            "reduce_scatter": builtin.reduce_scatter,
            "all_gather": builtin.all_gather,
            "broadcast": builtin.broadcast,
        },
    ),
    "ring": Algorithm(
        "reduce-scatter and all-gather around a ring",
        {
            "all_reduce": ring.all_reduce,
            "reduce_scatter": ring.reduce_scatter,
            "all_gather": ring.all_gather,
        },
    ),
    "bidirectional_ring": Algorithm(
        "two rings of half the data, one each way",
        {
            "all_reduce": bidirectional_ring.all_reduce,
            "reduce_scatter": bidirectional_ring.reduce_scatter,
            "all_gather": bidirectional_ring.all_gather,
        },
    ),
    "recursive_doubling": Algorithm(
        "exchange everything at distance 1, 2, 4, ..: fewest rounds",
        {"all_reduce": doubling.recursive_doubling},
    ),
    "halving_doubling": Algorithm(
        "Rabenseifner's: recursive halving, then recursive doubling",
        {
            "all_reduce": doubling.halving_doubling,
            "reduce_scatter": doubling.reduce_scatter,
            "all_gather": doubling.all_gather,
        },
    ),
    "tree": Algorithm(
        "binomial tree: reduce to rank 0, then broadcast",
        {"all_reduce": tree.all_reduce, "broadcast": tree.broadcast},
    ),
    "double_tree": Algorithm(
        "two binary trees with half the data each, in segments",
        {"all_reduce": double_tree.all_reduce},
    ),
    "hierarchical": Algorithm(
        "rings inside nodes, between nodes, inside again",
        {
            "all_reduce": hierarchical.all_reduce,
            "reduce_scatter": hierarchical.reduce_scatter,
            "all_gather": hierarchical.all_gather,
        },
    ),
    "naive": Algorithm(
        "everything to rank 0 and back, one rank after the other",
        {"all_reduce": naive.all_reduce, "broadcast": naive.broadcast},
    ),
    "all_gather_sum": Algorithm(
        "the compiler's all-gather, then a local sum",
        functions={"all_reduce": builtin.all_gather_sum},
    ),
    "psum_scatter_gather": Algorithm(
        "the compiler's reduce-scatter, then its all-gather",
        functions={"all_reduce": builtin.psum_scatter_gather},
    ),
    "all_to_all": Algorithm(
        "the compiler's all-to-all, a local sum, its all-gather",
        functions={
            "all_reduce": builtin.all_to_all,
            "reduce_scatter": builtin.all_to_all_scatter,
            "all_gather": builtin.all_gather,
        },
    ),
}


def get_algorithm(name: str) -> Algorithm:
    """The row called `name`.

    Raises:
      UserError: there is none of that name.
    """
    if name not in ALGORITHMS:
        raise UserError(f"algorithm {name!r} is not known; expected one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def algorithms_for(result: Result, *, scheduled: bool = False) -> list[str]:
    """Names of the rows that have a collective; with `scheduled`, that have it as a schedule."""
    return [
        name
        for name, row in ALGORITHMS.items()
        if result in row.schedules or (result in row.functions and not scheduled)
    ]


def run(
    result: Result,
    algorithm: str,
    x: jax.Array,
    axis_name: str,
    op: Op,
    options: Mapping[str, int | None],
) -> jax.Array:
    """One collective by one algorithm, inside `shard_map`.

    Raises:
      UserError: there is no such algorithm, or it lacks this collective, for this number of ranks,
        or an option.
    """
    row = get_algorithm(algorithm)
    if result in row.functions:
        function = row.functions[result]
        _check_options(algorithm, function, options)
        return function(x, axis_name, op, **options)
    if result not in row.schedules:
        have = ", ".join(algorithms_for(result))
        raise UserError(f"{algorithm} has no {result}; expected one of {have}")
    schedule = make_schedule(algorithm, result, jax.lax.axis_size(axis_name), **options)
    return execute(schedule, x, axis_name, op)


def make_schedule(algorithm: str, result: Result, n: int, **options: int | None) -> Schedule:
    """The schedule of an algorithm for `n` ranks; the same object each time.

    Raises:
      UserError: the algorithm has no schedule for this collective or this n, or no such option.
    """
    schedules = get_algorithm(algorithm).schedules
    if result not in schedules:
        have = ", ".join(algorithms_for(result, scheduled=True))
        raise UserError(f"{algorithm} has no {result} schedule; expected one of {have}")
    _check_options(algorithm, schedules[result], options)
    return _cached(schedules[result], n, **options)


@lru_cache(maxsize=128)
def _cached(factory: Factory, n: int, **options: int | None) -> Schedule:
    return factory(n, **options)


def _check_options(algorithm: str, function: Callable, options: Mapping[str, int | None]) -> None:
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for name, value in options.items():
        if name not in known:
            expected = f"expected {', '.join(known)}" if known else "it takes none"
            raise UserError(f"{algorithm} has no option {name!r}; {expected}")
        number = isinstance(value, Integral) and not isinstance(value, bool)
        if not number and not (value is None and known[name] is None):
            raise UserError(f"{algorithm}: {name}={value!r}; expected a whole number")

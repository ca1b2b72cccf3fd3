"""The table of algorithms: one row each; tests, configuration and comparison read it."""

from collections.abc import Callable
from typing import NamedTuple

from jaxdp.collectives import ring
from jaxdp.collectives.schedule import Schedule
from jaxdp.errors import UserError

Factory = Callable[[int], Schedule]


class Algorithm(NamedTuple):
    """An algorithm's schedules, each a function of the number of ranks; None: it has no such form.

    A row without any schedule is the compiler's own collective.
    """

    about: str
    all_reduce: Factory | None = None
    reduce_scatter: Factory | None = None
    all_gather: Factory | None = None


ALGORITHMS: dict[str, Algorithm] = {
    "psum": Algorithm("the compiler's all-reduce (NCCL on GPUs, ICI on TPUs)"),
    "ring": Algorithm(
        "reduce-scatter and all-gather around a ring of ppermutes",
        ring.all_reduce,
        ring.reduce_scatter,
        ring.all_gather,
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

"""What an all-reduce becomes in the compiled program: its collectives' kinds, counts and bytes."""

import jax
import jaxlib

from jaxdp.collectives import builtin
from jaxdp.collectives.cost import traffic
from jaxdp.collectives.schedule import Schedule
from jaxdp.collectives.table import get_algorithm, make_schedule
from jaxdp.plan import Planned


def planned_all_reduce(
    name: str, algorithm: str, size: int, itemsize: int, n: int
) -> tuple[Planned, ...]:
    """The collectives of `all_reduce` (op sum) on a vector.

    Args:
      name: what the vector carries.
      algorithm: a row of the table, not "auto".
      size, itemsize: elements of the vector, and bytes of each.
      n: ranks.
    """
    nbytes = size * itemsize
    if "all_reduce" in get_algorithm(algorithm).schedules:
        return planned_schedule(name, make_schedule(algorithm, "all_reduce", n), size, itemsize)
    if algorithm == "psum":
        return (Planned(name, "all-reduce", 1, nbytes, 2 * (n - 1) * nbytes // n),)
    if n == 1:
        return ()
    if algorithm == "all_gather_sum":
        return (Planned(name, "all-gather", 1, n * nbytes, (n - 1) * nbytes),)
    halves = "psum" if algorithm == "psum_scatter_gather" else algorithm
    part = -(-size // n)  # a rank's, padded
    return (
        *planned_reduce_scatter(name, halves, part, itemsize, n),
        *planned_all_gather(name, halves, part, itemsize, n),
    )


def planned_reduce_scatter(
    name: str, algorithm: str, part: int, itemsize: int, n: int
) -> tuple[Planned, ...]:
    """The collectives of `reduce_scatter` (op sum) on a vector of n parts, of `part` elements."""
    nbytes = part * itemsize
    if "reduce_scatter" in get_algorithm(algorithm).schedules:
        schedule = make_schedule(algorithm, "reduce_scatter", n)
        return planned_schedule(name, schedule, n * part, itemsize)
    if algorithm == "all_to_all":
        return (Planned(name, "all-to-all", 1, n * nbytes, (n - 1) * nbytes),)
    platform, processes = jax.default_backend(), jax.process_count()
    if builtin.psum_scatter_is_wrong(platform, processes, jaxlib.__version__):
        ring = make_schedule("ring", "reduce_scatter", n)
        return planned_schedule(name, ring, n * part, itemsize)
    return (Planned(name, "reduce-scatter", 1, nbytes, (n - 1) * nbytes),)


def planned_all_gather(
    name: str, algorithm: str, part: int, itemsize: int, n: int
) -> tuple[Planned, ...]:
    """The collectives of `all_gather` on a vector of `part` elements."""
    nbytes = part * itemsize
    if "all_gather" in get_algorithm(algorithm).schedules:
        schedule = make_schedule(algorithm, "all_gather", n)
        return planned_schedule(name, schedule, n * part, itemsize)
    return (Planned(name, "all-gather", 1, n * nbytes, (n - 1) * nbytes),)


def planned_schedule(
    name: str, schedule: Schedule, size: int, itemsize: int
) -> tuple[Planned, ...]:
    """The permutations that run a schedule on a vector of `size` elements."""
    counted = traffic(schedule, size * itemsize, itemsize=itemsize)
    if not counted.permutes or not size:
        return ()
    chunk = -(-size // schedule.chunks) * itemsize
    carried = sum(len(t.chunks[0]) for transfers in schedule.rounds for t in transfers) * chunk
    return (Planned(name, "collective-permute", counted.permutes, carried, counted.max_sent_bytes),)

"""Broken schedules, each broken in one way, and what `verify` says of them."""

from dataclasses import replace

import pytest

from jaxdp.collectives import ALGORITHMS, Schedule, ScheduleError, Transfer, make_schedule, verify

N = 4
RING = make_schedule("ring", "all_reduce", N)


def with_round(schedule: Schedule, number: int, **changes) -> Schedule:
    """`schedule` with the first transfer of a round changed."""
    rounds = list(schedule.rounds)
    first, *others = rounds[number]
    rounds[number] = (first._replace(**changes), *others)
    return replace(schedule, rounds=tuple(rounds))


@pytest.mark.parametrize("result", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("n", [*range(1, 10), 16])
@pytest.mark.parametrize("algorithm", [a for a, row in ALGORITHMS.items() if row.all_reduce])
def test_schedules_are_right(algorithm, n, result):
    if getattr(ALGORITHMS[algorithm], result):
        assert verify(make_schedule(algorithm, result, n)) in ("copied", "redundant", "owned")


def test_ring_computes_once_and_copies():
    assert verify(RING) == "copied"


def test_separate_sums_in_one_order_are_redundant():
    exchange = (Transfer(((0, 1), (1, 0)), ((0,), (0,)), reduce=True),)
    assert verify(Schedule(2, 1, (exchange,), ((0,), (0,)), "all_reduce")) == "redundant"


first = RING.rounds[0][0]
BROKEN = {
    "a round is lost": (replace(RING, rounds=RING.rounds[1:]), "counted 0 times"),
    "a round is run twice": (
        replace(RING, rounds=(*RING.rounds[:3], RING.rounds[2], *RING.rounds[3:])),
        "counted 2 times",
    ),
    "a chunk is added where it should be kept": (with_round(RING, 3, reduce=True), "counted 2"),
    "a chunk is kept where it should be added": (with_round(RING, 1, reduce=False), "counted 0"),
    "a wrong chunk": (
        with_round(RING, 0, chunks=(first.chunks[1], *first.chunks[1:])),
        "instead of 1",
    ),
    "the wrong rank": (with_round(RING, 0, pairs=((0, 2), (2, 1), (1, 3), (3, 0))), "instead of 1"),
    "a rank is a destination twice": (
        with_round(RING, 0, pairs=((0, 1), (1, 1), (2, 3), (3, 0))),
        "twice a source or twice a destination",
    ),
    "a rank that is not there": (
        with_round(RING, 0, pairs=((0, 1), (1, 2), (2, 3), (3, 4))),
        "outside 0..3",
    ),
    "a chunk that is not there": (with_round(RING, 0, chunks=((4,), (0,), (1,), (2,))), "outside"),
    "two transfers write one chunk": (
        replace(RING, rounds=(RING.rounds[0] * 2, *RING.rounds[1:])),
        "written twice",
    ),
    "different numbers of chunks": (
        with_round(RING, 0, chunks=((3, 1), (0,), (1,), (2,))),
        "different numbers",
    ),
    "slots that collide": (replace(RING, slot=((0, 0, 2, 3), *RING.slot[1:])), "not a permutation"),
    "a gather of what nobody has": (
        replace(make_schedule("ring", "all_gather", N), rounds=RING.rounds[4:]),
        "does not hold",
    ),
    "a reduction onto nothing": (
        with_round(make_schedule("ring", "all_gather", N), 0, reduce=True),
        "nothing to add it to",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_schedules_are_caught(name):
    schedule, reason = BROKEN[name]
    with pytest.raises(ScheduleError, match=reason):
        verify(schedule)


def test_an_order_that_differs_between_ranks_is_caught():
    def send(*pairs, reduce=True):
        return (Transfer(pairs, ((0,),) * len(pairs), reduce),)

    rounds = (
        send((0, 1), (1, 0)),  # a+b on ranks 0 and 1
        send((2, 0), (3, 1)),  # (a+b)+c on rank 0, (a+b)+d on rank 1
        send((3, 0), (2, 1)),
        send((0, 2), (1, 3), reduce=False),
    )
    with pytest.raises(ScheduleError, match="different orders"):
        verify(Schedule(4, 1, rounds, ((0,),) * 4, "all_reduce"))

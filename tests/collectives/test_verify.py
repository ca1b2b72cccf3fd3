"""Broken schedules, each broken in one way, and what `verify` says of them."""

from dataclasses import replace

import pytest

from jaxdp.collectives import (
    ALGORITHMS,
    Result,
    Schedule,
    ScheduleError,
    Transfer,
    make_schedule,
    verify,
)
from jaxdp.errors import UserError

N = 4
RING = make_schedule("ring", "all_reduce", N)


def with_round(schedule: Schedule, number: int, **changes) -> Schedule:
    """`schedule` with the first transfer of a round changed."""
    rounds = list(schedule.rounds)
    first, *others = rounds[number]
    rounds[number] = (first._replace(**changes), *others)
    return replace(schedule, rounds=tuple(rounds))


FORMS: list[tuple[str, Result]] = [
    (a, result) for a, row in ALGORITHMS.items() for result in row.schedules
]


@pytest.mark.parametrize(("algorithm", "result"), FORMS)
def test_schedules_are_right(algorithm, result):
    agreement = "owned" if result == "reduce_scatter" else "copied"
    for n in [*range(1, 18), 64]:
        if algorithm == "halving_doubling" and result != "all_reduce" and n.bit_count() > 1:
            with pytest.raises(UserError, match="expected a power of two"):
                make_schedule(algorithm, result, n)
            continue
        redundant = algorithm == "recursive_doubling" and n > 1
        found = verify(make_schedule(algorithm, result, n))
        assert found == ("redundant" if redundant else agreement)


def test_schedules_are_right_with_every_option():
    for n in range(1, 18):
        for segments in (1, 2, 3, 7):
            assert verify(make_schedule("double_tree", "all_reduce", n, segments=segments))
        for local_size in (d for d in range(1, n + 1) if n % d == 0):
            for result in ALGORITHMS["hierarchical"].schedules:
                assert verify(make_schedule("hierarchical", result, n, local_size=local_size))
        for algorithm in ("tree", "naive"):
            for root in range(n):
                assert verify(make_schedule(algorithm, "broadcast", n, root=root)) == "copied"


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
    "a root that is not there": (
        replace(make_schedule("tree", "broadcast", N), root=4),
        "root 4: a rank outside 0..3",
    ),
    "a broadcast of another rank's vector": (
        replace(make_schedule("tree", "broadcast", N), root=1),
        "does not hold",
    ),
    "a broadcast that adds": (
        with_round(make_schedule("naive", "broadcast", N), 0, reduce=True),
        "nothing to add it to",
    ),
    "a broadcast that forgets a rank": (
        replace(
            make_schedule("naive", "broadcast", N),
            rounds=make_schedule("naive", "broadcast", N).rounds[:-1],
        ),
        "rank 3 never receives chunk 0",
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


def with_transfer(schedule: Schedule, number: int, edit) -> Schedule:
    """`schedule` with `edit` of a round's first transfer in its place."""
    first = schedule.rounds[number][0]
    return with_round(schedule, number, **edit(first)._asdict())


def is_caught(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return True
    return False


def lose_a_message(t: Transfer) -> Transfer:
    return t._replace(pairs=t.pairs[1:], chunks=t.chunks[1:])


def swap_destinations(t: Transfer) -> Transfer:
    (s0, d0), (s1, d1), *others = t.pairs
    return t._replace(pairs=((s0, d1), (s1, d0), *others))


def swap_chunks(t: Transfer) -> Transfer:
    return t._replace(chunks=(t.chunks[1], t.chunks[0], *t.chunks[2:]))


def keep_or_add(t: Transfer) -> Transfer:
    return t._replace(reduce=not t.reduce)


EIGHT = {(a, result): make_schedule(a, result, 8) for a, result in FORMS}


@pytest.mark.parametrize(("algorithm", "result"), FORMS)
def test_every_round_of_every_algorithm_matters(algorithm, result):
    schedule = EIGHT[algorithm, result]
    for number, transfers in enumerate(schedule.rounds):
        before, after = schedule.rounds[:number], schedule.rounds[number + 1 :]
        broken = {
            "lost": replace(schedule, rounds=before + after),
            "kept or added": with_transfer(schedule, number, keep_or_add),
        }
        if transfers[0].reduce:  # to copy the same value twice is no mistake
            rounds = (*before, transfers, transfers, *after)
            broken["doubled"] = replace(schedule, rounds=rounds)
        if len(transfers[0].pairs) > 1:
            broken["a message lost"] = with_transfer(schedule, number, lose_a_message)
            if set(transfers[0].chunks[0]) != set(transfers[0].chunks[1]):
                broken["wrong chunk"] = with_transfer(schedule, number, swap_chunks)
                broken["wrong rank"] = with_transfer(schedule, number, swap_destinations)
        for name, wrong in broken.items():
            assert is_caught(wrong), (name, number)


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


def test_recursive_doubling_with_other_distances_on_odd_ranks_is_caught():
    def exchange(even, odd):
        moves = ((r, r ^ (odd if r % 2 else even)) for r in range(8))
        return (Transfer(tuple(moves), ((0,),) * 8, reduce=True),)

    rounds = (exchange(1, 1), exchange(2, 2), exchange(4, 4))
    assert verify(Schedule(8, 1, rounds, ((0,),) * 8, "all_reduce")) == "redundant"
    # (abcd)+(efgh) on even ranks, (abef)+(cdgh) on odd ones: each contribution once
    rounds = (exchange(1, 1), exchange(2, 4), exchange(4, 2))
    with pytest.raises(ScheduleError, match="different orders"):
        verify(Schedule(8, 1, rounds, ((0,),) * 8, "all_reduce"))

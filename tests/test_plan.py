"""Planned against found."""

from jaxdp.hlo import Collective
from jaxdp.plan import Plan, Planned, as_planned, compare

TWO = Plan(
    (
        Planned("bucket 0", "all-reduce", 1, 400, 600),
        Planned("bucket 1", "all-reduce", 1, 800, 1200),
    )
)
GUARD = Plan((Planned("fingerprints", "all-gather", 1, 32, 24),))


def reduces(*sizes, in_loop=False):
    return [Collective("all-reduce", size, in_loop) for size in sizes]


def test_plans_add_up():
    both = TWO + GUARD
    assert both.totals() == {"all-gather": (1, 32), "all-reduce": (2, 1200)}
    assert both.names == ("bucket 0", "bucket 1", "fingerprints")
    assert both.sent_bytes == 1824
    assert (Plan() + TWO) == TWO


def test_found_as_planned():
    found = [*reduces(400, 800), Collective("all-gather", 32, False)]
    assert as_planned(TWO + GUARD, found)
    assert compare(TWO + GUARD, found) == (
        "2 buckets, 1 fingerprints planned, 2 all-reduces, 1.2 kB; 1 all-gather, 32 B found in the "
        "compiled step"
    )
    assert as_planned(Plan(), [])
    assert compare(Plan(), []) == "nothing planned, no collective found in the compiled step"


def test_every_difference_is_told():
    planned = "2 buckets planned as 2 all-reduces, 1.2 kB; the compiled step runs "
    for found, words in (
        (reduces(1200), "1 all-reduce, 1.2 kB: the compiler merged them"),
        (reduces(400, 400, 400), "3 all-reduces, 1.2 kB: the compiler split them"),
        (
            reduces(800, 1600),
            "2 all-reduces, 2.4 kB: the compiler carries wider types than were asked for",
        ),
        (reduces(400, 800, in_loop=True), "2 all-reduces, 1.2 kB, 2 of them in a loop"),
        ([], "no collective"),
        ([*reduces(400, 800), Collective("all-gather", 32, False)],
         "2 all-reduces, 1.2 kB; 1 all-gather, 32 B"),
    ):  # fmt: skip
        assert not as_planned(TWO, found)
        assert compare(TWO, found).startswith(planned + words)

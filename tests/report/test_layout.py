import itertools

import pytest

from jaxdp.collectives import algorithms_for, make_schedule
from jaxdp.report.layout import WIDTH, layout, tree_of


def schedules():
    for name, n in itertools.product(algorithms_for("all_reduce", scheduled=True), range(2, 17)):
        yield name, n, make_schedule(name, "all_reduce", n)


@pytest.mark.parametrize("local_size", [None, 2, 4])
def test_boxes_lie_in_the_picture_and_apart(local_size):
    for name, n, schedule in schedules():
        if local_size and n % local_size:
            continue
        where = layout(schedule, local_size)
        w, h = where.size, where.size * where.aspect
        assert len(where.places) == n
        for x, y in where.places:
            assert w / 2 <= x <= WIDTH - w / 2, (name, n)
            assert h / 2 + 12 <= y <= where.height - h / 2, (name, n)  # a label is above it
        for (x1, y1), (x2, y2) in itertools.combinations(where.places, 2):
            assert abs(x1 - x2) >= w or abs(y1 - y2) >= h, (name, n)


def test_nodes_frame_their_ranks():
    where = layout(make_schedule("ring", "all_reduce", 12), local_size=4)
    assert len(where.nodes) == 3
    for rank, (x, y) in enumerate(where.places):
        left, top, width, height = where.nodes[rank // 4]
        assert left < x < left + width
        assert top < y < top + height


def test_tree_of_is_the_binomial_tree_and_nothing_else_is_one():
    for n in range(2, 17):
        # rank r hands over to r without its lowest bit
        wanted = {r: r & (r - 1) for r in range(1, n)}
        assert tree_of(make_schedule("tree", "all_reduce", n)) == wanted
        assert tree_of(make_schedule("tree", "broadcast", n)).keys() == wanted.keys()
        assert tree_of(make_schedule("naive", "all_reduce", n)) == dict.fromkeys(range(1, n), 0)
        assert tree_of(make_schedule("ring", "all_reduce", n)) is None
        assert tree_of(make_schedule("recursive_doubling", "all_reduce", n)) is None

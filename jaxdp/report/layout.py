"""Where ranks stand in a picture: a circle, a tree, or circles of nodes, as the schedule has it."""

from math import cos, pi, sin
from typing import NamedTuple

from jaxdp.collectives import Schedule

WIDTH = 400.0  # of every picture
_TOP = 22.0  # room for a label above a box
_LARGEST = 88.0  # a box
_MAX_LEAVES = 8  # of a tree, side by side


class Layout(NamedTuple):
    """A picture's measures, in units of which it is 400 wide.

    Attributes:
      places: the middle of each rank's box.
      size: the width of a box.
      aspect: its height over its width.
      height: of the picture.
      nodes: (x, y, width, height) of the frame around each node's ranks.
    """

    places: tuple[tuple[float, float], ...]
    size: float
    aspect: float
    height: float
    nodes: tuple[tuple[float, float, float, float], ...] = ()


def layout(schedule: Schedule, local_size: int | None = None) -> Layout:
    """The layout that shows a schedule's form.

    Args:
      schedule: any.
      local_size: ranks per node, consecutive: each node becomes a circle of its own; None, 1 or
        all: one level.
    """
    aspect = min(1.0, schedule.chunks / 4)
    if local_size is not None and 1 < local_size < schedule.n:
        return _nodes(schedule.n, local_size, aspect)
    parents = tree_of(schedule)
    if parents is None or schedule.n - len(set(parents.values())) > _MAX_LEAVES:
        return _circle(schedule.n, aspect)
    return _tree(parents, schedule.n, aspect)


def tree_of(schedule: Schedule) -> dict[int, int] | None:
    """child -> parent where all data go up (or down) one tree; None where they do not."""
    down = schedule.result == "broadcast"
    parents: dict[int, int] = {}
    for transfers in schedule.rounds:
        for move in transfers:
            for source, destination in move.pairs if move.reduce or down else ():
                child, parent = (destination, source) if down else (source, destination)
                if parents.setdefault(child, parent) != parent:
                    return None
    for rank in parents:
        above = {rank}
        while rank in parents:
            rank = parents[rank]
            if rank in above:  # around a ring
                return None
            above.add(rank)
    return parents if len(parents) == schedule.n - 1 else None


def _ring_of_places(n: int, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    angles = [2 * pi * r / n - pi / 2 for r in range(n)]
    return [(x + radius * cos(a), y + radius * sin(a)) for a in angles]


def _side(n: int, radius: float) -> float:
    """Width of a box on a circle of n, leaving room for labels and for messages in between."""
    return min(_LARGEST, 0.62 * 2 * radius * sin(pi / max(n, 2)))


def _circle(n: int, aspect: float) -> Layout:
    radius = 150.0 if n < 10 else 168.0
    size = _side(n, radius)
    middle = _TOP + size * aspect / 2 + radius
    places = _ring_of_places(n, WIDTH / 2, middle, min(radius, WIDTH / 2 - size / 2 - 4))
    lowest = max(y for _, y in places)
    return Layout(tuple(places), size, aspect, lowest + size * aspect / 2 + 8)


def _tree(parents: dict[int, int], n: int, aspect: float) -> Layout:
    children: dict[int, list[int]] = {
        r: [c for c in range(n) if parents.get(c) == r] for r in range(n)
    }
    root = next(r for r in range(n) if r not in parents)
    leaves = sum(not children[r] for r in range(n))
    size = min(_LARGEST, WIDTH / max(leaves, 1) * 0.8)
    level = size * aspect + 62
    places: dict[int, tuple[float, float]] = {}
    used = 0

    def place(rank: int, depth: int) -> float:
        nonlocal used
        if children[rank]:
            xs = [place(child, depth + 1) for child in children[rank]]
            x = (min(xs) + max(xs)) / 2
        else:
            x, used = WIDTH * (used + 0.5) / leaves, used + 1
        places[rank] = (x, _TOP + size * aspect / 2 + depth * level)
        return x

    place(root, 0)
    height = max(y for _, y in places.values()) + size * aspect / 2 + 8
    return Layout(tuple(places[r] for r in range(n)), size, aspect, height)


def _nodes(n: int, local: int, aspect: float) -> Layout:
    count = n // local
    columns = max(c for c in range(1, count + 1) if c * c <= count or c <= 2 <= count)
    width = WIDTH / columns
    radius = width * (0.3 if local > 2 else 0.22)
    size = min(0.8 * _side(local, radius), width * 0.3)
    tall = 2 * radius + size * aspect + _TOP + 26
    places, frames = [], []
    for node in range(count):
        x, y = (node % columns) * width, (node // columns) * tall
        middle = y + _TOP + 8 + size * aspect / 2 + radius
        places += _ring_of_places(local, x + width / 2, middle, radius)
        frames.append((x + 3, y + 3, width - 6, tall - 6))
    return Layout(tuple(places), size, aspect, tall * -(-count // columns), tuple(frames))

"""The picture inside a chart: frame, grid, lines and markers, as SVG."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from jaxdp.report.scale import Axis

# in units of the picture, which is as wide as a phone: a wider page enlarges it
WIDTH, HEIGHT = 420, 264
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 20, 34
_MANY = 30  # points of a line from which on only some get a marker
_SOME = 12
_DENSE = 300  # points from which on a line is thin, and its markers would hide more than show
_CHARACTER = 5.6  # width of one in the labels of ticks, for those that would touch

# Outlines around (0, 0): series are told apart without colour too.  Some are open.
SHAPES = (
    "m-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z",  # circle
    "m-3-3h6v6h-6z",  # square
    "m0-4.2l4.2 4.2l-4.2 4.2l-4.2-4.2z",  # diamond
    "m0-4l3.8 6.8h-7.6z",  # triangle
    "m0 4l3.8-6.8h-7.6z",  # the same on its head
    "m-4 0l6.8-3.8v7.6z",  # to the left
    "m-3-3l6 6m0-6l-6 6",  # cross
    "m-4 0h8m-4-4v8",  # plus
    "m-3.6-2h7.2m-7.2 4h7.2",  # two bars
    "m-2-3.6v7.2m4-7.2v7.2",  # two columns
    "m4 0l-6.8 3.8v-7.6z",  # to the right
    "m-4.5 0h9m-6.7-4l4.4 8m0-8l-4.4 8",  # star
)
COLOURS = 10  # of page.css; shapes and dashes begin anew after 12, so that pairs do not repeat soon

Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """Two axes on the picture."""

    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> Point:
        """Where a point of the data stands in the picture."""
        return self.across(x), self.up(y)

    def across(self, x: float) -> float:
        return round(LEFT + self.x.place(x) * (WIDTH - LEFT - RIGHT), 2)

    def up(self, y: float) -> float:
        return round(HEIGHT - BOTTOM - self.y.place(y) * (HEIGHT - TOP - BOTTOM), 2)


def frame(plot: Plot, x_label: str, y_label: str) -> str:
    """Grid, ticks and the names of the axes."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    minor = [f"M{plot.across(x):g} {bottom}v4" for x in plot.x.minor_ticks()]
    minor += [f"M{LEFT} {plot.up(y):g}h-4" for y in plot.y.minor_ticks()]
    x_ticks = [(plot.across(x), label) for x, label in plot.x.ticks()]
    y_ticks = [(plot.up(y), label) for y, label in plot.y.ticks()]
    grid = [f"M{x:g} {TOP}V{bottom}" for x, _ in x_ticks]
    grid += [f"M{LEFT} {y:g}H{right}" for y, _ in y_ticks]
    texts = [
        f'<text x="{x:g}" y="{bottom + 14}" text-anchor="middle">{escape(label)}</text>'
        for x, label in _apart(x_ticks)
    ]
    texts += [
        f'<text x="{LEFT - 6}" y="{y + 3.5:g}" text-anchor="end">{escape(label)}</text>'
        for y, label in y_ticks
    ]
    return (
        f'<path class="grid" d="{"".join(grid)}"/><path class="minor" d="{"".join(minor)}"/>'
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>{"".join(texts)}'
        f'<text class="name" x="{(LEFT + right) / 2:g}" y="{HEIGHT - 4}" text-anchor="middle">'
        f'{escape(x_label)}</text><text class="name" x="2" y="11">{escape(y_label)}</text>'
    )


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Every tick, or every second, .. , so that no two labels touch."""
    widest = max((len(label) for _, label in ticks), default=0) * _CHARACTER
    for stride in range(1, max(2, len(ticks))):
        some = ticks[::stride]
        if all(b[0] - a[0] > widest for a, b in pairwise(some)):
            return list(some)
    return list(ticks[:1])


def _look(style: int) -> str:
    return f"c{style % COLOURS} d{style % len(SHAPES)}"


def line(points: Iterable[Point | None], style: int, kind: str = "line") -> str:
    """A line that breaks where a point is None; `kind` is its class: "line" or "predicted"."""
    steps, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        steps.append(f"{pen}{point[0]:g} {point[1]:g}")
        pen = "L"
    if len(steps) > _DENSE:
        kind += " dense"
    return f'<path class="{kind} {_look(style)}" d="{"".join(steps)}"/>' if steps else ""


def markers(points: Sequence[Point | None], style: int) -> str:
    """The series' shape on its points, on some of them where there are many."""
    known = [point for point in points if point is not None]
    some = known if len(known) <= _MANY else known[:: -(-len(known) // _SOME)]
    some = some if len(known) <= _DENSE else []
    # a point between two gaps has no line: without its marker it would not be seen
    alone = [
        point
        for before, point, after in zip([None, *points], points, [*points[1:], None], strict=False)
        if point is not None and before is None and after is None
    ]
    shape = SHAPES[style % len(SHAPES)]
    path = "".join(f"M{x:g} {y:g}{shape}" for x, y in dict.fromkeys([*some, *alone]))
    return f'<path class="marker {_look(style)}" d="{path}"/>' if path else ""


def key(style: int) -> str:
    """A short piece of a series' line with its marker, for the legend."""
    return (
        '<svg class="key" viewBox="0 0 36 14" aria-hidden="true">'
        f"{line([(1, 7), (35, 7)], style)}{markers([(18, 7)], style)}</svg>"
    )


def verticals(plot: Plot, marks: Sequence[tuple[float, str]]) -> str:
    """Lines at certain x with their labels, written upwards where they are words."""
    drawn = []
    for x, label in marks:
        at = plot.across(x)
        short = len(label) <= 2
        where = (
            f'x="{at:g}" y="{TOP - 3}" text-anchor="middle"'
            if short
            else f'transform="translate({at - 3:g} {TOP + 4}) rotate(-90)" text-anchor="end"'
        )
        drawn.append(
            f'<path class="mark" d="M{at:g} {TOP}V{HEIGHT - BOTTOM}"/>'
            f'<text class="mark" {where}>{escape(label)}</text>'
        )
    return "".join(drawn)

"""Line charts and bars that are read without colour, without JavaScript and on a phone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain

from jaxdp.report import svg
from jaxdp.report.scale import Unit, axis, thin, write
from jaxdp.report.svg import Plot, Point

CHART_ASSETS = ("chart.css", "chart.js")
_MOST_POINTS = 800
_MOST_ROWS = 100  # of the table under a chart
_THIN = 0.03  # a part of a bar too thin to hold its number


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
      name: in the legend.
      x, y: the points; a y of None, NaN, infinity, or not above 0 on a logarithmic axis is a gap.
      predicted: what was expected of each point, drawn as a dotted line in the series' colour.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    predicted: Sequence[float | None] | None = None


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_unit: Unit = "",
    y_unit: Unit = "",
    log_x: bool = False,
    log_y: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    best: Sequence[tuple[float, float]] = (),
) -> str:
    """An HTML `<figure>`; its page needs `CHART_ASSETS`.

    Args:
      series: at least one; they need not have the same x.
      title, x_label, y_label: plain text.
      x_unit, y_unit: what the numbers are, see `scale.Unit`.
      log_x, log_y: whether an axis is logarithmic.
      marks: (x, label) of vertical lines.
      best: points of a pale band behind the lines.
    """
    values = list(chain.from_iterable([*one.y, *_predicted(one)] for one in series))
    xs = sorted({x for one in series for x in one.x} | {x for x, _ in marks})
    plot = Plot(axis(xs, log=log_x, unit=x_unit), axis(values, log=log_y, unit=y_unit))
    xs = [x for x in xs if plot.x.shown(x)]
    known = [dict(zip(one.x, one.y, strict=True)) for one in series]
    kept = [xs[i] for i in thin([[ys.get(x) for x in xs] for ys in known], _MOST_POINTS)]
    marks = [(x, label) for x, label in marks if plot.x.shown(x)]
    picture = [
        svg.frame(plot, x_label, y_label),
        svg.line([plot.at(*p) for p in best], 0, "best"),
        *(_drawn(plot, one, number, kept) for number, one in enumerate(series)),
        svg.verticals(plot, marks),
    ]
    described = f"{title}. {y_label} over {x_label}: {', '.join(one.name for one in series)}."
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<svg class="plot" viewBox="0 0 {svg.WIDTH} {svg.HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(described)}">{"".join(picture)}</svg>'
        f"{_legend(series, x_label)}{_data(plot, series, kept)}{_table(plot, series, x_label, xs)}"
        "</figure>\n"
    )


def _predicted(one: Series) -> Sequence[float | None]:
    return () if one.predicted is None else one.predicted


def _drawn(plot: Plot, one: Series, number: int, kept: Sequence[float]) -> str:
    points = _points(plot, one.x, one.y, kept)
    predicted = _points(plot, one.x, one.predicted, kept) if one.predicted is not None else []
    return (
        svg.line(predicted, number, "predicted")
        + svg.line(points, number)
        + svg.markers(points, number)
    )


def _points(
    plot: Plot, xs: Sequence[float], ys: Sequence[float | None], kept: Sequence[float]
) -> list[Point | None]:
    """The points of a series at the x that are kept; None for a gap."""
    known = dict(zip(xs, ys, strict=True))
    return [
        plot.at(x, y) if (y := known[x]) is not None and plot.y.shown(y) else None
        for x in kept
        if x in known
    ]


def _legend(series: Sequence[Series], x_label: str) -> str:
    """Names with their line and marker; the script writes the values under the pointer there."""
    entries = "".join(
        f'<li>{svg.key(number)}<span class="name">{escape(one.name)}</span>'
        f'<output class="number"></output></li>'
        for number, one in enumerate(series)
    )
    dotted = " · dotted: predicted" if any(one.predicted is not None for one in series) else ""
    return (
        f'<p class="readout"><span data-label="{escape(x_label)}">'
        f"point, touch or use the arrow keys for values</span>{dotted}</p>"
        f'<ul class="legend">{entries}</ul>'
    )


def _data(plot: Plot, series: Sequence[Series], kept: Sequence[float]) -> str:
    """What the script needs: per x its place, its words, and per series (place, words) or null."""
    rows = []
    known = [dict(zip(one.x, one.y, strict=True)) for one in series]
    expected = [dict(zip(one.x, _predicted(one), strict=False)) for one in series]
    for x in kept:
        cells = [
            _cell(plot, ys.get(x), guess.get(x)) for ys, guess in zip(known, expected, strict=True)
        ]
        if any(cells):
            rows.append([plot.across(x), write(x, plot.x.unit, 6), cells])
    # a name may hold "</script>": nothing here may look like markup
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def _cell(plot: Plot, y: float | None, guess: float | None) -> list | None:
    if y is None or not plot.y.shown(y):
        return None
    words = write(y, plot.y.unit)
    if guess is not None and plot.y.shown(guess):
        words += f" (predicted {write(guess, plot.y.unit)})"
    return [plot.up(y), words]


def _table(plot: Plot, series: Sequence[Series], x_label: str, xs: Sequence[float]) -> str:
    """The numbers of a small chart, for those who cannot see it."""
    known = [dict(zip(one.x, one.y, strict=True)) for one in series]
    rows = [x for x in xs if any(x in ys for ys in known)]
    if len(rows) > _MOST_ROWS:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in
                   (x_label, *(one.name for one in series)))  # fmt: skip
    body = "".join(
        f'<tr><th scope="row">{escape(write(x, plot.x.unit, 6))}</th>'
        + "".join(f"<td>{escape(write(ys.get(x), plot.y.unit))}</td>" for ys in known)
        + "</tr>"
        for x in rows
    )
    return (
        '<details><summary>the numbers</summary><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def bar(parts: Sequence[tuple[str, float]], *, title: str, unit: Unit = "s") -> str:
    """One horizontal bar: what a whole is made of.  Its page needs `CHART_ASSETS`.

    Args:
      parts: (name, value >= 0) in the order in which they are drawn; those of 0 are left out.
      title: plain text.
      unit: of the values.
    """
    parts = [(name, value) for name, value in parts if value > 0]
    whole = sum(value for _, value in parts)
    pieces = "".join(
        f'<span class="part c{number % svg.COLOURS}" style="width:{value / whole:.3%}">'
        f"{f'<b>{number + 1}</b>' if value / whole > _THIN else ''}</span>"
        for number, (_, value) in enumerate(parts)
    )
    entries = "".join(
        f'<li><span class="swatch c{number % svg.COLOURS}"><b>{number + 1}</b></span>'
        f'<span class="name">{escape(name)}</span>'
        f'<span class="number">{escape(write(value, unit, 3))} · {value / whole:.0%}</span></li>'
        for number, (name, value) in enumerate(parts)
    )
    total = f"{title}: {write(whole, unit, 3)}"
    return (
        f'<figure class="bar"><figcaption>{escape(total)}</figcaption>'
        f'<div class="parts" aria-hidden="true">{pieces}</div><ol class="legend">{entries}</ol>'
        "</figure>\n"
    )

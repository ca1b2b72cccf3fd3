"""A comparison as a page: what won, the charts, the model, the rows, and the algorithms played."""

from collections.abc import Iterator
from html import escape

from jaxdp.collectives import algorithms_for
from jaxdp.comparison.run import Comparison, Row
from jaxdp.comparison.text import (
    Size,
    average_bytes,
    best_per_size,
    crossovers,
    facts_line,
    model_error,
    size_of,
)
from jaxdp.report.chart import CHART_ASSETS, Series, line_chart
from jaxdp.report.page import Page, make_page
from jaxdp.report.player import DEFAULT_LINKS, MAX_RANKS, PLAYER_ASSETS, player_html
from jaxdp.report.scale import write
from jaxdp.report.table import TABLE_ASSETS, Cell, facts, notice, rows_table

_BUSY = 0.25  # load per core from which on times are those of a shared machine


def comparison_page(comparison: Comparison) -> Page:
    """The report of a comparison; `save` it, or let a notebook show it.

    Args:
      comparison: from `run_compare`.
    """
    first, n = comparison.rows[0], comparison.facts["devices"]
    what = f"{first['op']} on {n} ranks, {first['dtype']}"
    if first["redop"] != "none":
        what += f", {first['redop']}"
    sections = [
        f"<h1>{escape(what)}</h1>\n<p>{escape(facts_line(comparison.facts))}</p>\n",
        *_notices(comparison),
        "<h2>The fastest of each size</h2>\n",
        _best(comparison.rows),
        "<h2>Time and bandwidth</h2>\n",
        _charts(comparison.rows),
        *_model(comparison),
        "<h2>All rows</h2>\n",
        _rows(comparison.rows),
        "<h2>How the algorithms send</h2>\n",
        *_players(comparison),
        "<h2>Where it was measured</h2>\n",
        facts(_environment(comparison)),
    ]
    assets = (*CHART_ASSETS, *TABLE_ASSETS, *PLAYER_ASSETS)
    return make_page(what, "".join(sections), assets=assets, height=900)


def _notices(comparison: Comparison) -> Iterator[str]:
    """What a reader must know before any number."""
    seen = comparison.facts
    if comparison.wrong:
        names = dict.fromkeys(row["algorithm"] for row in comparison.rows if row["wrong"])
        yield notice(
            f"WRONG RESULTS: {comparison.wrong:,} elements are not what NumPy gets, by "
            f"{', '.join(names)}. The times of these rows mean nothing.",
            alarm=True,
        )
    else:
        yield "<p>Every result was checked against NumPy, and is right.</p>\n"
    if seen["platform"] == "cpu" and seen["devices"] > 1:
        what = "Processes on one machine, over loopback" if seen["processes"] > 1 else (
            "Emulated devices: shared memory"
        )  # fmt: skip
        yield notice(f"{what}, not a network. These times say nothing about one.")
    if seen["load"] > _BUSY * (seen["cpus"] or 1):
        yield notice(
            f"The machine was busy: load {seen['load']} on {seen['cpus']} cores before the run. "
            "Expect other times on an idle one."
        )


def _best(rows: list[Row]) -> str:
    table = []
    for size, row in best_per_size(rows).items():
        same = [other for other in rows if size_of(other) == size and not other["wrong"]]
        second = sorted(other["time_us"] for other in same)[1:2]
        psum = [other["time_us"] for other in same if other["algorithm"] == "psum"]
        table.append(
            [
                Cell(size_words(size), size[0] - 1e-6 * size[1]),
                Cell(row["algorithm"]),
                _time(row["time_us"]),
                _factor(psum[0] / row["time_us"] if psum else None),
                _factor(second[0] / row["time_us"] if second else None),
            ]
        )
    columns = ("size", "fastest", "time", "× psum's speed", "× the second's")
    return rows_table(columns, table, caption="medians; rows with wrong results do not count")


def size_words(size: Size) -> str:
    """A size of the sweep: `64 KiB`, or `407 KiB in 6 arrays`."""
    arrays = -size[1]
    return write(size[0], "bytes") + (f" in {arrays} arrays" if arrays > 1 else "")


def _crossovers(rows: list[Row]) -> str:
    found = [
        f"<li>between {size_words(size_of(one))} and {size_words(size_of(other))}: "
        f"{escape(one['algorithm'])} → {escape(other['algorithm'])}</li>"
        for one, other in crossovers(rows)
    ]
    if not found:
        return "<p>One algorithm is the fastest at every size.</p>\n"
    return f"<p>Crossovers, as numbered in the chart:</p>\n<ol>{''.join(found)}</ol>\n"


def _charts(rows: list[Row]) -> str:
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    of = {name: [row for row in rows if row["algorithm"] == name] for name in names}
    marks = [
        ((average_bytes(one) * average_bytes(other)) ** 0.5, str(number))
        for number, (one, other) in enumerate(crossovers(rows), 1)
    ]
    x_label = "bytes of an array" + (", on average" if rows[0]["arrays"] > 1 else "")
    time = line_chart(
        [
            Series(
                name,
                [average_bytes(row) for row in some],
                [row["time_us"] / 1e6 for row in some],
                _predictions(some),
            )
            for name, some in of.items()
        ],
        title="Time: measured, and predicted by the model of the network",
        x_label=x_label, y_label="time (median)", x_unit="bytes", y_unit="s",
        log_x=True, log_y=True, marks=marks,
        best=[(average_bytes(row), row["time_us"] / 1e6) for row in best_per_size(rows).values()],
    )  # fmt: skip
    busbw = line_chart(
        [
            Series(
                name,
                [average_bytes(row) for row in some],
                [row["busbw_gbps"] * 1e9 for row in some],
            )
            for name, some in of.items()
        ],
        title="Bus bandwidth: what every link must carry",
        x_label=x_label, y_label="busbw", x_unit="bytes", y_unit="bytes/s", log_x=True,
    )  # fmt: skip
    return f"{time}<p>The pale band follows the fastest.</p>\n{_crossovers(rows)}{busbw}"


def _predictions(rows: list[Row]) -> list[float | None] | None:
    found = [row["predicted_us"] and row["predicted_us"] / 1e6 for row in rows]
    return found if any(found) else None


def _model(comparison: Comparison) -> Iterator[str]:
    """The fitted network, and how far it is off."""
    network = comparison.network
    if network is None:
        return
    links, error = network.links, model_error(comparison.rows)
    rate = f" ({write(1 / links.beta, 'bytes/s')})" if links.beta else ""
    off = error and (
        f"off by a factor of {error[1]:.2f} (median), {error[2]:.2f} (worst), over "
        f"{error[0]} rows that were not fitted"
    )
    yield "<h2>The model of the network</h2>\n"
    yield (
        "<p>A program takes its start; a message of b bytes takes α + b β; combining b bytes takes "
        "b γ. Fitted to single permutations and a local add, so that the dotted lines are "
        "predictions.</p>\n"
    )
    yield facts(
        [
            ("start of a program", write(network.start_s, "s")),
            ("α, of a message", write(links.alpha, "s")),
            ("β, of a byte sent", f"{links.beta * 1e9:.3g} ns{rate}"),
            ("γ, of a byte combined", f"{links.gamma * 1e9:.3g} ns"),
            ("against the measured rows", off or "no row has a schedule to predict"),
        ]
    )


def _rows(rows: list[Row]) -> str:
    columns = (
        "bytes", "arrays", "count", "algorithm", "time", "p99", "predicted",
        "time / predicted", "algbw", "busbw", "wrong",
    )  # fmt: skip
    table = [
        [
            Cell(f"{row['bytes']:,}", row["bytes"]),
            Cell(str(row["arrays"]), row["arrays"]),
            Cell(f"{row['count']:,}", row["count"]),
            Cell(row["algorithm"]),
            _time(row["time_us"]),
            _time(row["time_us_p99"]),
            _time(row["predicted_us"]),
            _factor(row["predicted_us"] and row["time_us"] / row["predicted_us"]),
            Cell(write(row["algbw_gbps"] * 1e9, "bytes/s", 3), row["algbw_gbps"]),
            Cell(write(row["busbw_gbps"] * 1e9, "bytes/s", 3), row["busbw_gbps"]),
            Cell(f"{row['wrong']:,}{' WRONG' if row['wrong'] else ''}", row["wrong"],
                 bool(row["wrong"])),
        ]
        for row in rows
    ]  # fmt: skip
    several = any(row["arrays"] > 1 for row in rows)
    shown = [i for i, name in enumerate(columns) if several or name != "arrays"]
    samples = len(rows[0]["samples_us"])
    return rows_table(
        [columns[i] for i in shown],
        [[cells[i] for i in shown] for cells in table],
        caption=f"time: median of {samples} samples; 1 GB = 1e9 bytes; as nccl-tests counts them",
    )


def _time(microseconds: float | None) -> Cell:
    if microseconds is None:
        return Cell("–")
    return Cell(write(microseconds / 1e6, "s"), microseconds)


def _factor(value: float | None) -> Cell:
    return Cell("–") if value is None else Cell(f"{value:.2f}", value)


def _players(comparison: Comparison) -> Iterator[str]:
    """The two fastest with a schedule, at the smallest and the largest size."""
    op, n = comparison.rows[0]["op"], comparison.facts["devices"]
    scheduled = algorithms_for(op, scheduled=True)
    rows = [r for r in comparison.rows if r["algorithm"] in scheduled and not r["wrong"]]
    if not rows or not 2 <= n <= MAX_RANKS:
        why = (
            f"there are {n} ranks, and a picture needs 2 to {MAX_RANKS}"
            if rows
            else "no algorithm of this comparison has a schedule and right results"
        )
        yield f"<p>None is drawn: {why}.</p>\n"
        return
    links = comparison.network and comparison.network.links
    yield (
        "<p>The two fastest that have a schedule, replayed on the clock of the model"
        f"{' fitted here' if links else ''}: who sends what to whom, round by round.</p>\n"
    )
    sizes = sorted({size_of(row) for row in rows})
    for size in dict.fromkeys([sizes[0], sizes[-1]]):
        fastest = sorted((r for r in rows if size_of(r) == size), key=lambda r: r["time_us"])[:2]
        names = [row["algorithm"] for row in fastest]
        yield f"<h3>{' and '.join(names)} at {size_words(size)}</h3>\n"
        nbytes = max(1, round(average_bytes(fastest[0])))
        yield player_html(*names, n=n, op=op, nbytes=nbytes, links=links or DEFAULT_LINKS)


def _environment(comparison: Comparison) -> Iterator[tuple[str, str]]:
    for name, value in comparison.facts.items():
        yield (
            name.replace("_", " "),
            "yes" if value is True else "no" if value is False else str(value),
        )
    yield "the comparison took", write(comparison.seconds, "s", 3)

"""A comparison as a picture: time over size, both logarithmic."""

from pathlib import Path
from typing import Any

from jaxdp.comparison.run import Comparison, Row
from jaxdp.comparison.text import average_bytes, best_per_size, crossovers, facts_line
from jaxdp.errors import StorageError, UserError


def check_plot(path: str) -> None:
    """Raises UserError if there is nothing to plot with, or `path` ends in no format of it."""
    try:
        from matplotlib.figure import Figure  # an extra, and slow to import
    except ImportError:
        raise UserError("--plot: matplotlib is not installed; pip install matplotlib") from None
    known = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        endings = ", ".join(f".{name}" for name in known)
        raise UserError(f"--plot: {path}; expected a name that ends in one of {endings}")


def write_plot(comparison: Comparison, path: str) -> None:
    """Times over sizes: measured points, the model's lines, crossovers.  Raises StorageError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes: Any = figure.subplots()
    _draw_times(axes, comparison.rows)
    _draw_best(axes, comparison.rows)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes (of an array, on average)",
        ylabel="time, µs (median)",
    )
    what = f"{comparison.rows[0]['op']}: points measured, dotted predicted"
    axes.set_title(f"{what}\n{facts_line(comparison.facts)}", fontsize=8)
    axes.legend(fontsize=8)
    axes.grid(True, which="both", lw=0.3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error


def _draw_times(axes: Any, rows: list[Row]) -> None:
    """Each algorithm's points, and dotted what the model predicts."""
    markers = "osD^v<>Px*+"
    for number, name in enumerate(dict.fromkeys(row["algorithm"] for row in rows)):
        own = [row for row in rows if row["algorithm"] == name]
        sizes, color = [average_bytes(row) for row in own], f"C{number % 10}"
        marker = markers[number % len(markers)] + "-"
        times = [row["time_us"] for row in own]
        axes.plot(sizes, times, marker, color=color, label=name, lw=1)
        predicted = [row["predicted_us"] for row in own]
        if all(predicted):
            axes.plot(sizes, predicted, ":", color=color, lw=1.2)


def _draw_best(axes: Any, rows: list[Row]) -> None:
    """A band under the fastest, and a line where they change."""
    for one, other in crossovers(rows):
        x = (average_bytes(one) * average_bytes(other)) ** 0.5
        axes.axvline(x, color="gray", lw=0.8, ls="--")
        axes.annotate(
            f"{one['algorithm']} | {other['algorithm']}",
            (x, 0.99),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            fontsize=7,
            color="gray",
        )
    best = best_per_size(rows).values()
    sizes, times = [average_bytes(row) for row in best], [row["time_us"] for row in best]
    axes.plot(sizes, times, "k", lw=4, alpha=0.12)

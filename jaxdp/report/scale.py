"""Axes: where a value stands, which ticks are shown, and how numbers are written."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Unit = Literal["", "bytes", "bytes/s", "s", "share"]

# sizes and names of what numbers are counted in, largest first
_UNITS: dict[Unit, tuple[tuple[float, str], ...]] = {
    "": ((1, ""),),
    "bytes": ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "bytes/s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")),
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "share": ((0.01, "%"),),
}
_MOST_LABELS = 7
_LONG = 1e5  # plain numbers from here on are shortened on axes: 200k
_TINY = 1e-4


@dataclass(frozen=True)
class Axis:
    """A range of values on a line from 0 to 1.

    Attributes:
      low, high: the ends, low < high; positive if `log`.
      log: whether equal factors, not equal differences, are equally long.
      unit: what the values are: "" a number, "bytes" (1 KiB = 1024), "bytes/s"
        (1 GB = 1e9), "s" seconds, "share" 0 to 1.
    """

    low: float
    high: float
    log: bool = False
    unit: Unit = ""

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shown(self, value: float | None) -> bool:
        """Whether there is a place for it: finite, and positive if `log`."""
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self) -> list[tuple[float, str]]:
        """(value, label) of the labelled ticks, in order."""
        if not self.log:
            return self._linear_ticks()
        base = 2 if self.unit == "bytes" else 10
        powers = _powers(self.low, self.high, base)
        if len(powers) < 3 and base == 10:
            powers = _multiples(self.low, self.high, (1, 2, 5))
        if len(powers) < 3:
            return self._linear_ticks()
        if len(powers) > _MOST_LABELS:
            stride = _stride(len(powers), (2, 3, 4, 5, 10, 20, 50, 100))
            powers = [x for x in powers if round(math.log(x, base)) % stride == 0]
        return [(x, write(x, self.unit)) for x in powers]

    def minor_ticks(self) -> list[float]:
        """Values of ticks without a label: of logarithmic axes only."""
        if not self.log:
            return []
        if self.unit == "bytes":
            found = _powers(self.low, self.high, 2)
        else:
            found = _multiples(self.low, self.high, range(1, 10))
        labelled = {x for x, _ in self.ticks()}
        return [x for x in found if x not in labelled] if len(found) < 80 else []

    def _linear_ticks(self) -> list[tuple[float, str]]:
        step = _step(self.high - self.low, binary=self.unit == "bytes")
        numbers = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        largest = max(abs(self.low), abs(self.high))
        size, name = (
            (1e3, "k") if not self.unit and largest >= _LONG else _scale(largest, self.unit)
        )
        decimals = max(0, -math.floor(math.log10(step / size) + 1e-9))
        gap = " " if self.unit else ""
        return [
            (i * step, f"{i * step / size:,.{decimals}f}{gap if name else ''}{name}")
            for i in numbers
        ]


def axis(
    values: Iterable[float | None], *, log: bool = False, unit: Unit = "", pad: float = 0.04
) -> Axis:
    """An axis that shows all finite (and, if `log`, positive) values, with some room around.

    Args:
      values: of all series; those that cannot be shown are left out.
      log, unit: see `Axis`.
      pad: room at both ends, as a part of the whole.
    """
    shown = [x for x in values if x is not None and math.isfinite(x) and (x > 0 or not log)]
    low, high = (min(shown), max(shown)) if shown else (1.0, 1.0)
    if log:
        factor = (high / low) ** pad if high > low else 2.0
        return Axis(low / factor, high * factor, True, unit)
    room = (high - low) * pad or abs(high) * 0.1 or 1.0
    return Axis(low - room if low < 0 or low > room else 0.0, high + room, False, unit)


def write(value: float | None, unit: Unit = "", digits: int = 4) -> str:
    """A number as people read it: `1.5 KiB`, `41.2 µs`, `0.2512`, `9,600`."""
    if value is None or not math.isfinite(value):
        return "–"
    size, name = _scale(abs(value), unit)
    text = _significant(value / size, digits)
    return f"{text} {name}" if name else text


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    if abs(value) < _TINY:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_trimmed(mantissa)}e{int(exponent)}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return _trimmed(f"{round(value, decimals):,.{max(0, decimals)}f}")


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scale(largest: float, unit: Unit) -> tuple[float, str]:
    """What to count in: the largest of which there is one."""
    units = _UNITS[unit]
    if largest == 0:
        return units[-1] if unit.startswith("bytes") else units[0]
    return next(((s, name) for s, name in units if largest >= s * (1 - 1e-9)), units[-1])


def _step(span: float, binary: bool) -> float:
    """The smallest step of the form 1, 2, 5 times a power of ten that gives few enough ticks."""
    least = span / (_MOST_LABELS - 1)
    if binary:
        return 2.0 ** math.ceil(math.log2(least) - 1e-9)
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least * (1 - 1e-9))


def _powers(low: float, high: float, base: int) -> list[float]:
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    return [float(base) ** k for k in range(first, last + 1)]


def _multiples(low: float, high: float, factors: Sequence[int]) -> list[float]:
    """Factors times powers of ten, between low and high."""
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    found = (factor * 10.0**k for k in exponents for factor in factors)
    return [x for x in found if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]


def _stride(count: int, strides: Sequence[int]) -> int:
    return next((s for s in strides if count / s <= _MOST_LABELS), strides[-1])


def thin(columns: Sequence[Sequence[float | None]], most: int) -> list[int]:
    """Numbers of the rows to draw: all, or about `most`, with every extreme of every column.

    Rows are cut into equal bins; of each bin stay its first row and, per column, its smallest, its
    largest, and its first gap.  So peaks and gaps of a long run are seen at any width.

    Args:
      columns: values of each series, one per row; None or NaN is a gap.
      most: rows that may stay.
    """
    rows = max(map(len, columns), default=0)
    if rows <= most:
        return list(range(rows))
    bins = max(1, most // (2 * len(columns)))
    edges = [rows * i // bins for i in range(bins + 1)]
    kept = {rows - 1}
    for begin, end in pairwise(edges):
        kept.add(begin)
        for column in columns:
            kept |= _extremes(column, begin, end)
    return sorted(kept)


def _extremes(column: Sequence[float | None], begin: int, end: int) -> set[int]:
    values = {i: x for i in range(begin, end) if (x := column[i]) is not None and math.isfinite(x)}
    gap = [i for i in range(begin, end) if i not in values][:1]
    if not values:
        return set(gap)
    return {*gap, min(values, key=values.__getitem__), max(values, key=values.__getitem__)}

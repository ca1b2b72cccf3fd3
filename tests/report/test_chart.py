"""Charts: what stands where, read back from the SVG."""

import json
import re

import numpy as np
import pytest

from jaxdp.report.chart import Series, bar, line_chart
from jaxdp.report.scale import Axis, axis, thin, write

NUMBER = r"(-?[\d.]+)"


def chart(*series, **options):
    given = {"title": "t", "x_label": "x", "y_label": "y"} | options
    return line_chart(series, **given)


def lines_of(html):
    """Each line as its stretches of points."""
    found = []
    for path in re.findall(r'<path class="line [^"]*" d="([^"]*)"', html.split("</svg>")[0]):
        stretches = [re.findall(rf"{NUMBER} {NUMBER}", part) for part in path.split("M")[1:]]
        found.append([[(float(x), float(y)) for x, y in part] for part in stretches])
    return found


def labels_of(html):
    """(position, value) of the labelled ticks of each axis, from the texts in the picture."""
    picture = html.split("</svg>")[0]

    def values(pattern):
        found = re.findall(pattern, picture)
        return [(float(at), float(text.replace(",", ""))) for at, text in found]

    x = values(rf'<text x="{NUMBER}" y="244" text-anchor="middle">([-\d.,e]+)<')
    y = values(rf'<text x="44" y="{NUMBER}" text-anchor="end">([-\d.,e]+)<')
    return x, [(at - 3.5, value) for at, value in y]


def read_back(ticks, positions, log):
    """Values at positions, by the line through the outermost two ticks."""
    (p, a), (q, b) = ticks[0], ticks[-1]
    if log:
        a, b = np.log([a, b])
    values = a + (np.asarray(positions) - p) * (b - a) / (q - p)
    return np.exp(values) if log else values


@pytest.mark.parametrize("log", [False, True])
def test_points_stand_where_the_ticks_say(log, rng):
    x = np.sort(rng.uniform(1, 3000, 20))
    y = [np.exp(rng.normal(0, 3, 20)) if log else rng.normal(0, 50, 20) for _ in range(2)]
    html = chart(Series("a", x, y[0]), Series("b", x, y[1]), log_x=log, log_y=log)
    x_ticks, y_ticks = labels_of(html)
    for [points], values in zip(lines_of(html), y, strict=True):
        across, up = zip(*points, strict=True)
        # positions have two decimals on a picture of 420
        span = {"rtol": 2e-3} if log else {"atol": 0.3, "rtol": 0}
        np.testing.assert_allclose(read_back(x_ticks, across, log), x, **span)
        np.testing.assert_allclose(read_back(y_ticks, up, log), values, **span)


def test_linear_ticks_are_1_2_5(rng):
    for _ in range(200):
        low = rng.normal() * 10 ** rng.uniform(-4, 6)
        one = Axis(low, low + abs(low) * 10 ** rng.uniform(-3, 4))
        values = [value for value, _ in one.ticks()]
        assert 2 <= len(values) <= 8
        step = np.diff(values).mean()
        np.testing.assert_allclose(np.diff(values), step, rtol=1e-6)
        mantissa = step / 10 ** np.floor(np.log10(step) + 1e-6)
        assert min(abs(mantissa - m) for m in (1, 2, 5)) < 1e-5
        assert one.low - step * 1e-6 <= min(values)
        assert max(values) <= one.high + step * 1e-6
        labels = [label for _, label in one.ticks()]
        assert len(set(labels)) == len(labels)
        for value, label in one.ticks():
            text = label.replace(",", "")
            number = float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)
            assert number == pytest.approx(value, abs=step * 1e-6)


def test_logarithmic_ticks_are_powers(rng):
    for _ in range(100):
        low = 10 ** rng.uniform(-9, 0)
        one = Axis(low, low * 10 ** rng.uniform(3, 9), log=True)
        exponents = [np.log10(value) for value, _ in one.ticks()]
        np.testing.assert_allclose(exponents, np.round(exponents), atol=1e-9)
        assert 2 <= len(exponents) <= 7
        assert len(set(np.round(np.diff(exponents), 6))) <= 1
    bytes_axis = Axis(1000, 5e6, log=True, unit="bytes")
    assert [label for _, label in bytes_axis.ticks()] == ["1 KiB", "4 KiB", "16 KiB", "64 KiB",
                                                          "256 KiB", "1 MiB", "4 MiB"]  # fmt: skip
    assert bytes_axis.minor_ticks() == [1024.0 * 2**k for k in range(1, 13, 2)]


def test_an_axis_of_one_value_or_none_has_room(rng):
    for values in ([], [None, float("nan")], [0.0], [rng.normal()]):
        one = axis(values)
        assert one.low < one.high
        assert one.ticks()
    assert axis([-1.0, 0.0, 5.0], log=True).low > 0


def test_numbers_as_people_read_them():
    assert [write(x, "s") for x in (0, 3.2e-6, 0.0412, 9.99996, 75)] == [
        "0 s", "3.2 µs", "41.2 ms", "10 s", "75 s",
    ]  # fmt: skip
    assert [write(x, "bytes") for x in (0, 1, 1024, 1536, 3 << 20)] == [
        "0 B", "1 B", "1 KiB", "1.5 KiB", "3 MiB",
    ]  # fmt: skip
    assert [write(x) for x in (0, 0.25123, 12345.6, -3e-7, None, float("inf"))] == [
        "0", "0.2512", "12,350", "-3e-7", "–", "–",
    ]  # fmt: skip
    assert write(0.1234, "share") == "12.34 %"
    assert write(2.5e9, "bytes/s") == "2.5 GB/s"


def test_a_line_breaks_at_a_gap_and_a_lonely_point_is_marked():
    y = [1.0, 2.0, None, 3.0, float("nan"), 4.0, 5.0, -1.0, 6.0]
    html = chart(Series("a", range(9), y), log_y=True)
    [stretches] = lines_of(html)
    assert [len(part) for part in stretches] == [2, 1, 2, 1]
    markers = re.search(r'class="marker [^"]*" d="([^"]*)"', html)
    assert markers
    assert len(re.findall(r"M[\d.]+ [\d.]+m", markers[1])) == 6


def test_names_are_text_and_nothing_else(check_html):
    name = '<b>"&</script>'
    html = chart(Series(name, [1, 2], [1, 2]), title=name, x_label=name, y_label=name,
                 marks=[(1.5, name)])  # fmt: skip
    assert "b" not in check_html(html)
    assert "b" not in check_html(chart(Series(name, [1], [2]))) | check_html(line_chart(
        [], title=name, x_label="x", y_label="y"))  # fmt: skip
    assert name not in bar([(name, 1.0)], title=name)


def test_a_long_series_keeps_its_extremes_and_gaps(rng):
    y = list(rng.normal(size=20_000))
    peaks = rng.choice(20_000, 6, replace=False)
    for i, value in zip(peaks, (9.0, 10.0, -9.0, -10.0, None, None), strict=True):
        y[i] = value
    kept = thin([y], 800)
    assert set(peaks[:4]) <= set(kept)
    # a gap in a bin is kept, though it need not be the same one
    assert sum(y[i] is None for i in kept) == 2 or abs(peaks[4] - peaks[5]) < 50
    assert len(kept) < 2000
    html = chart(Series("a", range(20_000), y))
    [stretches] = lines_of(html)
    heights = [point[1] for part in stretches for point in part]
    _, ticks = labels_of(html)
    assert read_back(ticks, min(heights), False) == pytest.approx(10, abs=0.1)
    assert read_back(ticks, max(heights), False) == pytest.approx(-10, abs=0.1)
    assert len(html) < 200_000


def test_the_values_of_the_readout_are_the_data(rng):
    x = np.sort(rng.choice(1000, 12, replace=False))
    a, b = rng.uniform(1, 9, 12), rng.uniform(1, 9, 6)
    html = chart(Series("a", x, a, predicted=2 * a), Series("b", x[::2], b))
    data = re.search(r'<script type="application/json">(.*?)</script>', html)
    assert data
    rows = json.loads(data[1])
    assert [words for _, words, _ in rows] == [write(i, digits=6) for i in x]
    for i, (_, _, (first, second)) in enumerate(rows):
        assert first[1] == f"{write(a[i])} (predicted {write(2 * a[i])})"
        assert (second is None) == bool(i % 2)
    assert "dotted: predicted" in html
    assert html.count('<path class="predicted ') == 1


def test_every_series_of_a_dozen_looks_different(rng):
    html = chart(*(Series(str(i), [1, 2, 3], rng.normal(size=3)) for i in range(12)))
    shapes = re.findall(r'<path class="marker [^"]*" d="M[\d.]+ [\d.]+(m[^M]*)', html)[:12]
    assert len(set(shapes)) == 12
    looks = re.findall(r'<path class="line (c\d d\d+)"', html)[:12]
    assert len({look.split()[1] for look in looks}) == 12


def test_a_bar_is_whole(rng, check_html):
    seconds = rng.uniform(0.1, 5, 4)
    html = bar([("a", seconds[0]), ("none", 0), *zip("bcd", seconds[1:], strict=True)], title="t")
    widths = [float(x) for x in re.findall(r"width:([\d.]+)%", html)]
    np.testing.assert_allclose(widths, 100 * seconds / seconds.sum(), atol=1e-3)
    assert "none" not in html
    assert {"figure", "ol"} <= check_html(html)
    check_html(bar([], title="nothing"))

"""The compare report: what it says of the rows it was made from."""

import re

import jax
import numpy as np
import pytest

from jaxdp import run_compare
from jaxdp.collectives import Links
from jaxdp.comparison.network import Network
from jaxdp.comparison.page import comparison_page
from jaxdp.comparison.run import Comparison
from jaxdp.comparison.text import best_per_size, crossovers
from jaxdp.report.scale import write

FACTS = {
    "platform": "cpu", "device_kind": "cpu", "devices": 4, "processes": 1, "emulated": True,
    "python": "3.11", "jax": "0.10", "jaxlib": "0.10", "cpus": 2, "load": 0.1,
}  # fmt: skip


def synthetic(rng, *, names=("psum", "ring", "tree"), sizes=(1024, 4096, 65536), **facts):
    """A comparison with random times; psum has no prediction, as ever."""
    rows = []
    for nbytes in sizes:
        for name in names:
            time_us = float(rng.uniform(50, 5000))
            rows.append(
                {
                    "op": "all_reduce", "redop": "sum", "algorithm": name, "bytes": nbytes,
                    "count": nbytes // 4, "dtype": "float32", "time_us": time_us,
                    "time_us_p99": 1.5 * time_us, "algbw_gbps": nbytes / time_us / 1e3,
                    "busbw_gbps": 1.5 * nbytes / time_us / 1e3, "wrong": 0, "arrays": 1,
                    "predicted_us": None if name == "psum" else float(rng.uniform(50, 5000)),
                    "compile_s": 0.1, "samples_us": [time_us] * 5,
                }
            )  # fmt: skip
    links = Links(alpha=2e-5, beta=1e-10, gamma=1e-11)
    return Comparison(rows, Network(1e-4, links), FACTS | facts, 12.0)


def text_of(html):
    """What a reader sees of a page, tags and scripts left out."""
    html = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_every_row_is_there_and_the_best_are_named(rng, check_html):
    found = synthetic(rng)
    page = comparison_page(found)
    assert {"figure", "table", "section"} <= check_html(page.html)
    body = re.findall(r"<tbody>(.*?)</tbody>", page.html, re.DOTALL)
    rows = next(part for part in body if part.count("<tr>") == len(found.rows))
    for row, line in zip(found.rows, rows.split("</tr>"), strict=False):
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", line)
        assert cells[:3] == [f"{row['bytes']:,}", f"{row['count']:,}", row["algorithm"]]
        assert cells[3] == write(row["time_us"] / 1e6, "s")
        assert (cells[5] == "–") == (row["algorithm"] == "psum")
    text = text_of(page.html)
    for size, row in best_per_size(found.rows).items():
        assert f"{write(size[0], 'bytes')} {row['algorithm']} " in text
    for one, other in crossovers(found.rows):
        assert f"{one['algorithm']} → {other['algorithm']}" in text
    assert "Emulated devices: shared memory, not a network" in text
    assert "Every result was checked against NumPy" in text
    assert "over 6 rows that were not fitted" in text
    assert "busy" not in text
    assert page.html.count('<section class="player" tabindex') == 2
    assert len(page.html) < 2_000_000


def test_wrong_results_are_said_in_words(rng):
    found = synthetic(rng, load=3.0)
    found.rows[1]["wrong"] = 17  # ring at the smallest size
    text = text_of(comparison_page(found).html)
    assert "WRONG RESULTS: 17 elements are not what NumPy gets, by ring." in text
    assert "17 WRONG" in text
    assert "Every result" not in text
    assert "The machine was busy: load 3.0 on 2 cores" in text


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"devices": 17}, "there are 17 ranks, and a picture needs 2 to 16"),
        ({"names": ("psum", "all_gather_sum")}, "no algorithm of this comparison has a schedule"),
    ],
)
def test_where_there_is_no_player_a_line_says_why(options, line, rng):
    page = comparison_page(synthetic(rng, **options))
    assert line in text_of(page.html)
    assert '<section class="player" tabindex' not in page.html


def test_the_buckets_of_a_model(rng, check_html):
    found = synthetic(rng, sizes=(600_000,))
    for number, row in enumerate(found.rows):
        row["arrays"] = 1 + number % 3
    found.rows[:] = [row | {"arrays": k} for row in found.rows for k in (6, 2, 1)]
    page = comparison_page(found)
    check_html(page.html)
    text = text_of(page.html)
    assert "585.9 KiB in 6 arrays" in text
    assert "bytes of an array, on average" in text
    assert "arrays" in re.findall(r'<button type="button">([^<]*)', page.html)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "broadcast"])
def test_a_real_comparison(op, check_html):
    found = run_compare(jax.devices()[:3], op=op, sizes=[1000], iters=2, fit=op != "broadcast")
    page = comparison_page(found)
    check_html(page.html)
    assert ("The model of the network" in page.html) == (found.network is not None)
    assert np.all([row["algorithm"] in page.html for row in found.rows])


def test_two_hundred_rows_are_a_small_page(rng):
    names = ("psum", "ring", "bidirectional_ring", "recursive_doubling", "halving_doubling",
             "tree", "double_tree", "naive")  # fmt: skip
    page = comparison_page(synthetic(rng, names=names, sizes=[2**k for k in range(6, 31)]))
    assert len(page.html) < 500_000

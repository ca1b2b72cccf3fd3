"""Charts and tables as a browser shows them: values under the pointer, sorting, width.

The fixture `browser` fails a test in which a page made the browser complain.
"""

import numpy as np
import pytest

from jaxdp.collectives import Links
from jaxdp.comparison.network import Network
from jaxdp.comparison.page import comparison_page
from jaxdp.comparison.run import Comparison
from jaxdp.report.chart import CHART_ASSETS, Series, bar, line_chart
from jaxdp.report.page import make_page
from jaxdp.report.scale import write
from jaxdp.report.table import TABLE_ASSETS, Cell, facts, notice, rows_table

LONG = "a_name_that_is_longer_than_any_algorithm_has"


@pytest.fixture
def keys():
    return pytest.importorskip("selenium.webdriver").Keys


@pytest.fixture
def act(browser):
    return lambda: pytest.importorskip("selenium.webdriver").ActionChains(browser)


def find(browser, selector):
    return browser.find_elements("css selector", selector)


def texts(browser, selector):
    return [element.text for element in find(browser, selector)]


@pytest.fixture
def charted(rng):
    """A page with one chart, and what it was made from."""
    x = np.sort(rng.choice(10_000, 15, replace=False))
    a, b = rng.uniform(1, 9, 15), [float(y) for y in rng.uniform(1, 9, 15)]
    b[7] = None
    html = line_chart([Series("a", x, a), Series(LONG, x, b)], title="t", x_label="step",
                      y_label="y")  # fmt: skip
    return make_page("t", html, assets=CHART_ASSETS), x, a, b


def test_the_pointer_shows_the_data(browser, open_page, act, charted):
    page, x, a, b = charted
    open_page(browser, page)
    [plot] = find(browser, "svg.plot")
    assert texts(browser, ".legend output") == ["", ""]
    for i in (0, 7, 14):
        at = browser.execute_script(
            "const d = document.querySelector('path.line').getAttribute('d');"
            "const m = d.match(/[\\d.]+ [\\d.]+/g);"
            "const p = document.querySelector('svg.plot').createSVGPoint();"
            f"[p.x, p.y] = m[{i}].split(' ').map(Number);"
            "const q = p.matrixTransform(document.querySelector('svg.plot').getScreenCTM());"
            "const box = document.querySelector('svg.plot').getBoundingClientRect();"
            "return [q.x - box.x - box.width / 2, q.y - box.y - box.height / 2]"
        )
        act().move_to_element_with_offset(plot, round(at[0]), round(at[1])).perform()
        assert texts(browser, ".legend output") == [write(a[i]), write(b[i]) if b[i] else ""]
        assert texts(browser, ".readout span") == [f"step: {write(x[i], digits=6)}"]
        assert len(find(browser, "circle.here")) == (2 if b[i] else 1)
    act().move_to_element(find(browser, "figcaption")[0]).perform()
    assert texts(browser, ".legend output") == ["", ""]


def test_arrow_keys_lead_from_point_to_point(browser, open_page, act, charted, keys):
    page, x, a, _ = charted
    open_page(browser, page)

    def press(*names):
        act().send_keys(*names).perform()
        return texts(browser, ".legend output")[0]

    press(keys.TAB)
    assert browser.execute_script("return document.activeElement.getAttribute('class')") == "plot"
    assert press(keys.ARROW_RIGHT) == write(a[0])
    assert press(keys.ARROW_RIGHT, keys.ARROW_RIGHT) == write(a[2])
    assert press(keys.ARROW_LEFT) == write(a[1])
    assert press(keys.END) == write(a[14])
    assert press(keys.ARROW_RIGHT) == write(a[14])
    assert press(keys.HOME) == write(a[0])
    assert press(keys.ESCAPE) == ""
    assert press(keys.ARROW_LEFT) == write(a[14])
    assert texts(browser, ".readout span") == [f"step: {write(x[14], digits=6)}"]


@pytest.fixture
def sorted_page(rng):
    numbers = [float(x) for x in rng.uniform(1e-6, 2000, 40)]
    rows = [[Cell(f"name{i}"), Cell(write(x, "s"), x)] for i, x in enumerate(numbers)]
    rows.insert(20, [Cell("none"), Cell("–")])
    page = make_page("t", rows_table(["name", "time"], rows, caption="c"), assets=TABLE_ASSETS)
    order = [f"name{i}" for i in np.argsort(numbers)]
    return page, order


@pytest.mark.parametrize("how", ["click", "keyboard"])
def test_a_column_is_sorted(how, browser, open_page, act, keys, sorted_page):
    page, order = sorted_page
    open_page(browser, page)
    [by_name, by_time] = find(browser, "th button")

    def press(button):
        if how == "click":
            button.click()
        else:
            browser.execute_script("arguments[0].focus()", button)
            act().send_keys(keys.ENTER).perform()
        return texts(browser, "tbody td:first-child")

    assert press(by_time) == [*order, "none"]
    assert find(browser, "th")[1].get_attribute("aria-sort") == "ascending"
    assert press(by_time) == [*order[::-1], "none"]
    assert find(browser, "th")[1].get_attribute("aria-sort") == "descending"
    assert press(by_name)[:3] == ["name0", "name1", "name2"]  # not name10
    assert [head.get_attribute("aria-sort") for head in find(browser, "th")] == ["ascending", None]


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_page(width, dark, browser, open_page, rng):
    rows = [
        {
            "op": "all_reduce", "redop": "sum", "algorithm": name, "bytes": nbytes, "count": 1,
            "dtype": "float32", "time_us": 9e9, "time_us_p99": 9e9, "algbw_gbps": 1e-6,
            "busbw_gbps": 123.456, "wrong": 10**6, "arrays": 100, "predicted_us": 1e6,
            "compile_s": 0.1, "samples_us": [1.0],
        }
        for name in ("psum", "ring", "recursive_doubling", LONG) for nbytes in (1, 10**12)
    ]  # fmt: skip
    rows[2]["wrong"] = rows[3]["wrong"] = rows[4]["wrong"] = 0
    seen = {
        "platform": "cpu", "device_kind": LONG * 2, "devices": 8, "processes": 1, "python": LONG,
        "jax": LONG, "jaxlib": "0", "cpus": 1, "load": 99.0,
    }  # fmt: skip
    page = comparison_page(Comparison(rows, Network(1, Links(1, 1, 1)), seen, 1.0))
    body = notice(LONG * 3, alarm=True) + facts([("x", LONG * 4), (LONG, "y")])
    body += bar([(LONG, 1.0), ("b", 1e-9)], title=LONG)
    y = rng.normal(size=2000)
    body += f'<div class="charts">{line_chart([Series(LONG, range(2000), y)], title=LONG, x_label=LONG, y_label=LONG)}</div>'  # fmt: skip  # noqa: E501
    assets = (*CHART_ASSETS, *TABLE_ASSETS)
    for one in (page, make_page("t", body, assets=assets)):
        open_page(browser, one, width=width, dark=dark)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_words_in_a_chart_can_be_read_on_a_phone(browser, open_page, charted):
    open_page(browser, charted[0], width=360)
    heights = browser.execute_script(
        "return [...document.querySelectorAll('.plot text')].map(t => "
        "parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a)"
    )
    assert min(heights) >= 8

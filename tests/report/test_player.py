"""The player: what a browser shows is what the simulator gets and the cost model says."""

import json
import re

import numpy as np
import pytest

from jaxdp.collectives import Links, make_schedule, predict_s, trace, traffic
from jaxdp.errors import UserError
from jaxdp.report import animate

ALGORITHMS = ("ring", "bidirectional_ring", "recursive_doubling", "halving_doubling", "tree")
ALGORITHMS += ("double_tree", "hierarchical", "naive")

# name -> its round, and ranks x chunks -> the contributors that the page shows there
HELD = """return Object.fromEntries([...document.querySelectorAll(".track")].map((track) => [
  track.dataset.name, [Number(track.dataset.round), [...track.querySelectorAll(".rank")].map(
  (rank) => [...rank.querySelectorAll("[data-chunk]")].map((chunk) => {
    const filled = [...chunk.querySelectorAll(".cell")].map((cell) => cell.style.fill !== "none");
    const shown = filled.flatMap((on, r) => on ? [r] : []).join(" ");
    return shown === chunk.dataset.held ? shown : "the picture and data-held differ";
  }))]]))"""
ENDS = (
    """return PRICED.map(([track, nbytes, links]) => Schedule.ends(track, nbytes, links).at(-1))"""
)


def shown(browser):
    """name -> (round, bits of the contributors `[rank][chunk]`), all in one question."""
    return {
        name: (k, [[sum(1 << int(r) for r in cell.split()) for cell in row] for row in rows])
        for name, (k, rows) in browser.execute_script(HELD).items()
    }


def simulated(schedule):
    """Bits of the contributors, `[round][rank][chunk]`."""
    size = schedule.chunks // schedule.n if schedule.result == "all_gather" else schedule.chunks
    inputs = [np.full(size, 1 << r) for r in range(schedule.n)]
    return [[[int(c[0]) for c in row] for row in held] for held in trace(schedule, inputs)]


def press(browser, key):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser).send_keys(getattr(Keys, key)).perform()


def tracks_of(page):
    return json.loads(re.search(r'<script type="application/json">(.*)</script>', page.html)[1])


def test_every_round_is_the_simulators(browser, open_page, few):
    for n in few(range(2, 9), 3):
        open_page(browser, animate(*ALGORITHMS, n=n))
        rounds = {name: simulated(make_schedule(name, "all_reduce", n)) for name in ALGORITHMS}
        seen, before = dict.fromkeys(ALGORITHMS, 0), None
        while (now := shown(browser)) != before:
            assert now.keys() == rounds.keys()
            for name, (k, held) in now.items():
                assert k - seen[name] in (0, 1), "a step is one round"
                assert held == rounds[name][k]
                seen[name] = k
            before = now
            press(browser, "ARROW_RIGHT")
        assert seen == {name: len(rounds[name]) - 1 for name in ALGORITHMS}


def position(browser, name):
    track = browser.find_element("css selector", f".track[data-name='{name}']")
    return int(track.get_attribute("data-round"))


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather"])
def test_other_collectives_end_as_simulated(browser, open_page, op):
    for name in ("ring", "halving_doubling", "hierarchical"):
        open_page(browser, animate(name, n=4, op=op))
        press(browser, "END")
        _, held = shown(browser)[name]
        assert held == simulated(make_schedule(name, op, 4))[-1]
        ticks = [e.text for e in browser.find_elements("css selector", ".rank > text")]
        assert all("✓" in text for text in ticks)


def test_its_clock_is_the_cost_model(browser, open_page, rng):
    cases, wanted = [], []
    for name in ALGORITHMS:
        n, nbytes = int(rng.integers(2, 17)), int(rng.integers(1, 1 << 24))
        alpha, beta, gamma, alpha_inter, beta_inter = 10.0 ** -rng.uniform(4, 10, 5)
        local = int(rng.choice([d for d in range(1, n + 1) if n % d == 0]))
        ports = int(rng.integers(1, 3))
        links = Links(alpha, beta, gamma, local, alpha_inter, beta_inter, ports)
        data = tracks_of(animate(name, n=n, links=links))
        cases.append([data["tracks"][0], nbytes, data["links"]])
        schedule = make_schedule(name, "all_reduce", n)
        wanted.append(predict_s(schedule, nbytes, links))
    open_page(browser, animate("ring", n=2))
    got = browser.execute_script(f"const PRICED = {json.dumps(cases)}; {ENDS}")
    np.testing.assert_allclose(got, wanted, rtol=1e-9)


def test_buttons_keys_and_sliders(browser, open_page):
    open_page(browser, animate("tree", "ring", n=8, nbytes=1 << 24))
    button = {b.text: b for b in browser.find_elements("tag name", "button")}
    button["Next"].click()
    assert position(browser, "ring") == 1
    button["Back"].click()
    assert position(browser, "ring") == 0
    button["End"].click()
    assert (position(browser, "tree"), position(browser, "ring")) == (6, 14)
    press(browser, "HOME")
    assert position(browser, "ring") == 0
    press(browser, "END")
    press(browser, "ARROW_LEFT")
    assert position(browser, "tree") == 5
    verdict = browser.find_element("css selector", ".verdict")
    assert verdict.text.startswith("ring is done first")
    slider = browser.find_element("css selector", "input[aria-label='message']")
    from selenium.webdriver.common.keys import Keys

    slider.send_keys(Keys.HOME)  # the smallest message: latency decides, and the tree has fewer
    assert verdict.text.startswith("tree is done first")
    scrub = browser.find_element("css selector", "input[aria-label='model time']")
    scrub.send_keys(Keys.END)
    assert position(browser, "ring") == 14
    sent = traffic(make_schedule("ring", "all_reduce", 8), 256).max_sent_bytes
    status = browser.find_element("css selector", ".track[data-name='ring'] .status").text
    assert f"busiest rank sent {sent} B of {sent} B" in status


def test_play_and_pause(browser, open_page):
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, animate("ring", n=4))
    press(browser, "SPACE")
    WebDriverWait(browser, 30).until(lambda b: position(b, "ring") >= 1)
    press(browser, "SPACE")
    held = position(browser, "ring"), browser.find_element("css selector", ".status").text
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert held == (position(browser, "ring"), browser.find_element("css selector", ".status").text)
    toggle = [b for b in browser.find_elements("tag name", "button") if b.text == "Play"]
    browser.execute_script("document.querySelector('select').value = '4'")
    toggle[0].click()
    WebDriverWait(browser, 30).until(lambda b: position(b, "ring") == 6)
    assert toggle[0].text == "Play"  # at the end it stops by itself


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_its_width(browser, open_page, dark):
    open_page(browser, animate("tree", "ring", n=16), width=360, dark=dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 384) == dark


def test_in_a_cell_two_players_do_not_meet(browser, open_page):
    from jaxdp.report.page import make_page

    cells = "".join(animate(name, n=3)._repr_html_() for name in ("ring", "tree"))
    open_page(browser, make_page("two cells", cells))
    for i, name in enumerate(("ring", "tree")):
        browser.switch_to.frame(i)
        assert len(browser.find_elements("css selector", ".player .track")) == 1
        assert position(browser, name) == 0
        browser.switch_to.default_content()


def test_a_page_is_small_and_needs_nothing_else():
    page = animate(*ALGORITHMS, n=8)
    assert len(page.html) < 80_000
    assert "http" not in page.html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(src|href)=(?!\"data:,\")|@import|url\((?!#|`?#|\$)", page.html)
    assert "html" in repr(page).lower()


def test_a_schedule_of_ones_own():
    data = tracks_of(animate(make_schedule("ring", "all_reduce", 3), n=3))
    assert data["tracks"][0]["name"] == "a schedule"
    assert data["tracks"][0]["rounds"] == tracks_of(animate("ring", n=3))["tracks"][0]["rounds"]


def test_options_reach_the_algorithm():
    tracks = [tracks_of(animate("double_tree", n=4, segments=s))["tracks"][0] for s in (1, 3)]
    assert [track["chunks"] for track in tracks] == [2, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithms": ["psum"]}, "psum has no all_reduce schedule"),
        ({"algorithms": ["rign"]}, "'rign' is not known"),
        ({"algorithms": []}, "no algorithm was given"),
        ({"algorithms": ["ring"], "n": 1}, "n=1 ranks was asked for; expected 2 to 16"),
        ({"algorithms": ["ring"], "n": 17}, "n=17 ranks was asked for; expected 2 to 16"),
        ({"algorithms": ["ring"], "segments": 2}, "segments"),
        ({"algorithms": ["ring"], "n": 6, "links": Links(1, 1, local_size=4)}, "nodes of 4 ranks"),
        ({"algorithms": [make_schedule("ring", "all_reduce", 3)]}, "of 3 ranks; expected one of"),
    ],
)
def test_mistakes(arguments, message):
    algorithms = arguments.pop("algorithms")
    with pytest.raises(UserError, match=re.escape(message)):
        animate(*algorithms, **arguments)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nbytes": 0}, "animate: nbytes=0; expected at least 1"),
        ({"links": Links(0, 0)}, "alpha=0 and beta=0; expected one of them above 0"),
        ({"links": Links(-1e-6, 1e-9)}, "links of alpha=-1e-06; expected 0 or more seconds"),
        ({"links": Links(1e-6, 1e-9, beta_inter=float("nan"))}, "links of beta_inter=nan"),
    ],
)
def test_a_clock_that_does_not_go_is_refused(given, words):
    with pytest.raises(UserError, match=re.escape(words)) as error:
        animate("ring", n=2, **given)
    assert len(error.value.lines) == 1


@pytest.mark.parametrize(("alpha", "beta"), [(0, 1e-9), (1e-6, 0)])
def test_knobs_of_a_network_without_latency_or_limit(alpha, beta, browser, open_page):
    open_page(browser, animate("ring", n=2, links=Links(alpha, beta)))
    knobs = browser.execute_script(
        "return [...document.querySelectorAll('label input[type=range]')].map("
        "(i) => [i.min, i.max, i.value].map(Number))"
    )
    assert len(knobs) >= 3
    for low, high, value in knobs:
        assert np.isfinite([low, high, value]).all()
        assert low - 1e-9 <= value <= high + 1e-9  # the browser rounds

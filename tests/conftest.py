"""All tests run on nine emulated CPU devices; a test takes the first n of them.

Inputs are random.  The seed is printed at the start; `--seed N` repeats a run, `--every-case` tries
all cases of the sweeps instead of a random few.
"""

import os
import re
import secrets
import signal
from html.parser import HTMLParser

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp.data import Loader

DEVICES = 9

# a shell has these ignored in what it runs in the background, and so would all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

jaxdp.emulate(DEVICES)
# broadcasting a [b] against a [b, k] by accident is a wrong result without an error
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def mesh_of():
    """n -> a mesh over the first n devices."""
    return lambda n: jaxdp.data_mesh(jax.devices()[:n])


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="of all random inputs")
    parser.addoption("--every-case", action="store_true", help="all cases of the sweeps")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        config.option.seed = config.workerinput["seed"]
    elif config.option.seed is None:
        config.option.seed = secrets.randbelow(2**32)
    # many tests compile the same programs; most of the suite's time would go there
    for name, value in (
        ("jax_compilation_cache_dir", str(config.cache.mkdir("jax"))),
        ("jax_persistent_cache_min_compile_time_secs", 0.1),
    ):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # of the programs that tests start


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Hands the seed to a worker: one that it drew itself could not be repeated."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"seed of random inputs: {config.option.seed}")


@pytest.fixture
def rng(request):
    """A generator for this test alone, from the run's seed and the test's name."""
    return np.random.default_rng([request.config.option.seed, *request.node.nodeid.encode()])


@pytest.fixture
def poison(monkeypatch):
    """Steps, numbered from 1, whose last example becomes NaN: after what data sets refuse."""

    def poison(*bad):
        real = Loader.batch

        def batch(self, step, *rows):
            found = dict(real(self, step, *rows))
            if step + 1 in bad:
                found["inputs"] = found["inputs"].copy()
                found["inputs"][-1] = np.nan
            return found

        monkeypatch.setattr(Loader, "batch", batch)

    return poison


class Nesting(HTMLParser):
    """Fails where an element is closed that is not the innermost open one."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input", "path", "rect", "circle", "line"})

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing, at {self.getpos()}"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()} inside {self.open}"

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)


@pytest.fixture
def check_html():
    """html -> its elements' names; it must be well-formed, and ask for nothing from outside."""

    def check(html):
        parser = Nesting()
        parser.feed(html)
        parser.close()
        assert not parser.open
        urls = set(re.findall(r"https?://[^\s\"'<>)]*", html))
        assert urls <= {"http://www.w3.org/2000/svg"}, urls
        return parser.seen

    return check


@pytest.fixture
def few(request, rng):
    """(cases, count) -> a random few of them in their order, or all with `--every-case`."""

    def choose(cases, count):
        cases = list(cases)
        if request.config.option.every_case or count >= len(cases):
            return cases
        return [cases[i] for i in sorted(rng.choice(len(cases), count, replace=False))]

    return choose

"""The text of --help."""

import re

import pytest

from jaxdp.config import help_text
from jaxdp.config.keys import KEYS, SECTIONS
from jaxdp.config.schema import ALGORITHMS
from jaxdp.errors import Exit


@pytest.mark.parametrize("path", KEYS)
def test_every_key_is_explained(path):
    text = " ".join(help_text().split())
    assert f"--{path} " in text
    for field in KEYS[path].values():
        assert str(field.description) in text


def test_every_kind_and_choice_is_named():
    text = help_text()
    for kinds in SECTIONS.values():
        for kind in filter(None, kinds):
            assert f"        {kind}: " in text
    for name in ALGORITHMS:
        assert re.search(rf"\b{name}\b", text)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_width(width):
    assert max(map(len, help_text(width).splitlines())) <= width


def test_program_and_exit_codes():
    text = help_text(prog="python -m jaxdp.check")
    assert text.startswith("Usage: python -m jaxdp.check [--config FILE] [--KEY VALUE ...]\n")
    last = " ".join(text[text.index("Exit codes:") :].split())
    for code in Exit:
        assert f"{code.value} " in last


def test_an_entry():
    assert """
  --optimizer.learning_rate
      learning rate after the warm-up (a number above 0; default 0.1 for sgd,
      0.05 for momentum, 0.001 for adam and adamw, 0.0001 for lion, 0.01 for
      adafactor)
""" in help_text()

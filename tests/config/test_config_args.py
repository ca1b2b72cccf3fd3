"""The command line."""

import pytest

from jaxdp.config import Args, parse_args
from jaxdp.errors import UserError


def parse(line: str) -> Args:
    return parse_args(line.split(), "train")


def mistakes(line: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse(line)
    return list(caught.value.lines)


def test_nothing():
    assert parse("") == Args(None, (), False, False)


@pytest.mark.parametrize("line", ["--config a.yaml --steps 3", "--steps=3 --config=a.yaml"])
def test_both_ways_to_write_a_value(line):
    assert parse(line) == Args("a.yaml", (("steps", 3),), False, False)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--optimizer.learning_rate 3e-4", 3e-4),
        ("--optimizer.learning_rate -1", -1),
        ("--optimizer.learning_rate=-1E4", -1e4),
        ("--model.hidden [256,128]", [256, 128]),
        ("--model.hidden 256,128", [256, 128]),
        ("--out 2024", "2024"),
        ("--out a=b", "a=b"),
        ("--out=--a", "--a"),
        ("--out=", ""),
        ("--data.path 1e4", "1e4"),
        ("--resume", True),
        ("--resume auto", "auto"),
        ("--resume false", False),
        ("--log.tensorboard", True),
        ("--optimizer.nesterov", True),
        ("--no_such_key", True),
    ],
)
def test_values(line, value):
    args = parse(line)
    assert args.overrides == ((line.split()[0].partition("=")[0][2:], value),)


def test_bare_flags_before_other_options():
    args = parse("--resume --log.tensorboard --print_config --steps 3")
    assert args.overrides == (("resume", True), ("log.tensorboard", True), ("steps", 3))
    assert args.print_config


@pytest.mark.parametrize("line", ["-h", "--help", "--steps --help", "stray -h --steps"])
def test_help_wins(line):
    assert parse(line) == Args(help=True)


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (
            "--seed",
            [
                "--seed: a value is missing; expected a whole number of at least 0 and at most "
                "4294967295"
            ],
        ),
        (
            "--model.hidden --seed 3",
            [
                "--model.hidden: a value is missing; expected a list of whole numbers of at "
                "least 1 or a whole number of at least 1"
            ],
        ),
        ("--config", ["--config: a value is missing; expected a YAML file"]),
        ("--config=", ["--config: a value is missing; expected a YAML file"]),
        ("--print_config=no", ["--print_config: 'no' is not allowed; it takes no value"]),
        ("--steps 3 --seed 1 --steps=3", ["--steps: given twice"]),
        ("--config a --config b --config", ["--config: given twice"]),
        ("a.yaml", ["a.yaml: not an option; did you mean --config a.yaml?"]),
        ("steps=3", ["steps=3: not an option; did you mean --steps=3?"]),
        ("-steps=3", ["-steps=3: not an option; did you mean --steps=3?"]),
        ("foo", ["foo: not an option; expected --key value, see train --help"]),
        ("--", ["--: not an option; expected --key value, see train --help"]),
        ("--=3", ["--=3: not an option; expected --key value, see train --help"]),
        (
            "x.yml --steps 3 4 --seed",
            [
                "x.yml: not an option; did you mean --config x.yml?",
                "4: not an option; expected --key value, see train --help",
                "--seed: a value is missing; "
                "expected a whole number of at least 0 and at most 4294967295",
            ],
        ),
    ],
)
def test_mistakes(line, lines):
    assert mistakes(line) == lines

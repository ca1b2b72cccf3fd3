"""The command line: `--config FILE`, and every key of the configuration as `--key value`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxdp.config.keys import FLAG_KEYS, KEYS
from jaxdp.config.read import read_value
from jaxdp.config.words import either, expected, show
from jaxdp.errors import UserError


class Args(NamedTuple):
    """What a command line asks for."""

    config_path: str | None = None
    overrides: tuple[tuple[str, Any], ...] = ()
    print_config: bool = False
    help: bool = False


def parse_args(argv: Sequence[str], prog: str) -> Args:
    """Reads a command line; names and values of keys are judged later, by `load_config`.

    Args:
        argv: the arguments, without the program.
        prog: how the program is called, for messages.

    Raises:
        UserError: with a line for each stray word, missing value and repeated key.

    >>> parse_args(["--config", "a.yaml", "--steps=3", "--resume"], "train").overrides
    (('steps', 3), ('resume', True))
    """
    if {"-h", "--help"} & set(argv):
        return Args(help=True)
    words, strays = _split(argv)
    mistakes = [_stray(word, prog) for word in strays]
    options: dict[str, Any] = {}
    for key, text in words:
        if key in options:
            mistakes.append(f"--{key}: given twice")
        elif fault := _fault(key, text):
            mistakes.append(f"--{key}: {fault}")
        options.setdefault(key, True if text is None else _read(key, text))
    if mistakes:
        raise UserError(*dict.fromkeys(mistakes))
    config, print_config = options.pop("config", None), options.pop("print_config", False)
    return Args(config, tuple(options.items()), print_config)


def _split(argv: Sequence[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Options with their value (None if there is none), and words that belong to no option."""
    options: list[tuple[str, str | None]] = []
    strays = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            strays.append(word)
        elif has_value:
            options.append((key, value))
        elif key == "print_config" or not rest or rest[0].startswith("--"):
            options.append((key, None))
        else:  # also "-1": options have two dashes
            options.append((key, rest.pop(0)))
    return options, strays


def _read(key: str, text: str) -> Any:
    return text if key == "config" else read_value(key, text)


def _fault(key: str, text: str | None) -> str | None:
    if key == "config":
        return None if text else "a value is missing; expected a YAML file"
    if key == "print_config":
        return None if text is None else f"{show(text)} is not allowed; it takes no value"
    if text is None and key in KEYS and key not in FLAG_KEYS:
        words = dict.fromkeys(expected(field) for field in KEYS[key].values())
        return f"a value is missing; expected {either(words)}"
    return None


def _stray(word: str, prog: str) -> str:
    if word.lower().endswith((".yaml", ".yml")):
        hint = f"did you mean --config {word}?"
    elif word.partition("=")[0].lstrip("-") in KEYS:
        hint = f"did you mean --{word.lstrip('-')}?"
    else:
        hint = f"expected --key value, see {prog} --help"
    return f"{word}: not an option; {hint}"

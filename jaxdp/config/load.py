"""From a file and the command line to a configuration, or to all mistakes in them at once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxdp.config.keys import DEFAULT_KINDS, KEYS, SECTIONS, fields_of_kinds, section_of
from jaxdp.config.read import Entry, Source, read_file
from jaxdp.config.rules import broken_rules
from jaxdp.config.schema import Config
from jaxdp.config.words import either, expected, show, similar, unknown_key, wrong_value
from jaxdp.errors import UserError

Fault = tuple[str, str]  # the key, and what is wrong with it


def load_config(path: str | None, overrides: Sequence[tuple[str, Any]] = ()) -> Config:
    """Reads a configuration file, then applies overrides; what neither names has its default.

    Args:
        path: a YAML file; None for the defaults.
        overrides: (dotted key, value), as from the command line; a later one replaces an earlier.

    Raises:
        UserError: with a line for every mistake, in the order of the file and the command line.
    """
    source = read_file(path) if path is not None else Source({}, [])
    given = source.entries | {key: Entry(value, f"--{key}") for key, value in overrides}
    kinds = _kinds(given)
    fields = fields_of_kinds(kinds)
    values = {key: given[key].value for key in given if key in fields}
    config, faults = _validate(kinds, values)
    faults = _key_faults(given, kinds) + faults
    faults += broken_rules(_sound_values(kinds, values, {key for key, _ in faults}))
    if config is None or faults or source.mistakes:
        raise UserError(*source.mistakes, *_lines(given, faults))
    return config


def _kinds(given: Mapping[str, Entry]) -> dict[str, str]:
    """The kind of each section; a section whose kind is invalid is left out."""
    kinds = {}
    for section, models in SECTIONS.items():
        entry = given.get(f"{section}.kind")
        kind = entry.value if entry and "" not in models else DEFAULT_KINDS[section]
        if isinstance(kind, str) and kind in models:
            kinds[section] = kind
    return kinds


def _key_faults(given: Mapping[str, Entry], kinds: Mapping[str, str]) -> list[Fault]:
    """Keys that do not exist, or not for the chosen kind, and kinds that do not exist."""
    faults = []
    for key, entry in given.items():
        section = section_of(key)
        chosen = kinds.get(section, "")
        if key in SECTIONS:
            example = next(name for name in KEYS if section_of(name) == key)
            text = f"{show(entry.value)} is not allowed; expected keys such as {example}"
        elif key not in KEYS:
            text = unknown_key(key)
        elif section and section not in kinds:
            if key != f"{section}.kind":
                continue  # nothing can be said before the kind is known
            choices = SECTIONS[section]
            text = f"{show(entry.value)} is not allowed; expected {either(choices)}"
            text += similar(entry.value, choices)
        elif chosen not in KEYS[key]:
            text = f"belongs to {section}.kind {either(KEYS[key])}, not {chosen}"
        else:
            continue
        faults.append((key, text))
    return faults


def _validate(
    kinds: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[Config | None, list[Fault]]:
    """The configuration, or what is wrong with single values."""
    raw: dict[str, Any] = {
        section: {"kind": kind} if kind else {} for section, kind in kinds.items()
    }
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        (raw[section] if section else raw)[leaf] = value
    try:
        return Config.model_validate(raw), []
    except ValidationError as error:
        return None, list(_value_faults(kinds, values, error.errors(include_url=False)))


def _value_faults(
    kinds: Mapping[str, str], values: Mapping[str, Any], errors: Iterable[ErrorDetails]
) -> Iterable[Fault]:
    fields = fields_of_kinds(kinds)
    # One per key: pydantic has one for each type of a union and for each item of a list.
    first = {_key(error["loc"], kinds): error["type"] for error in reversed(list(errors))}
    for key in sorted(first, key=list(fields).index):
        field, section = fields[key], section_of(key)
        kind = f"{section}.kind {kinds[section]}" if kinds.get(section) else ""
        if first[key] == "missing":
            yield key, f"missing; {kind} needs it: {expected(field)}"
            continue
        text = wrong_value(field, values[key], first[key])
        differs = len({expected(other) for other in KEYS[key].values()}) > 1
        yield key, f"{text} (with {kind})" if differs else text


def _key(loc: tuple[int | str, ...], kinds: Mapping[str, str]) -> str:
    """The user's name of a place in pydantic's errors, which has kinds and list items in it."""
    section, *rest = map(str, loc)
    if section not in kinds:
        return section
    return f"{section}.{rest[1] if kinds[section] else rest[0]}"


def _sound_values(
    kinds: Mapping[str, str], values: Mapping[str, Any], faulty: set[str]
) -> dict[str, Any]:
    """The value of every key that is not faulty, given or by default."""
    return {
        key: values.get(key, field.default)
        for key, field in fields_of_kinds(kinds).items()
        if key not in faulty and section_of(key) not in faulty
    }


def _lines(given: Mapping[str, Entry], faults: Iterable[Fault]) -> list[str]:
    """A line per fault, first those of given keys, in their order."""
    order = {key: i for i, key in enumerate(given)}
    faults = sorted(faults, key=lambda fault: order.get(fault[0], len(order)))
    return [f"{given[key].label if key in given else key}: {text}" for key, text in faults]

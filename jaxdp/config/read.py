"""Reads YAML 1.2 into flat keys that know where they were written.

In YAML 1.2 `3e-4`, `1E4` and `.5` are numbers, and `yes`, `no`, `on` and `off` are text.  We read
nodes instead of ready values because nodes have lines and the text as written: `out: 2024` names a
folder, and the same key twice is found.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, Event
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from jaxdp.config.keys import LIST_KEYS, SECTIONS, TEXT_KEYS
from jaxdp.errors import UserError

_TAG = "tag:yaml.org,2002:"
_VALUES = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}


class Entry(NamedTuple):
    """A value, and how errors call its key: `configs/x.yaml:3: steps` or `--steps`."""

    value: Any
    label: str


class Source(NamedTuple):
    """What a file says: its entries by dotted name, and a line for each mistake of form."""

    entries: dict[str, Entry]
    mistakes: list[str]


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


def _compose(text: str) -> Node | None:
    """The top node of a YAML text; None if it is empty.

    Aliases are refused, since they may grow without bound, and tags, since no key needs one.
    """
    for event in _yaml().parse(text):
        for name, feature in (("aliases", type(event) is AliasEvent), ("tags", _tagged(event))):
            if feature:
                problem = f"{name} are not supported; write a plain value"
                raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
    return _yaml().compose(text)


def _tagged(event: Event) -> bool:
    return getattr(event, "tag", None) is not None


def _scalar(node: ScalarNode, as_text: bool) -> Any:
    if node.tag not in _VALUES or (as_text and node.tag != f"{_TAG}null"):
        return node.value  # dates too: they mean nothing to us
    try:
        return _yaml().constructor.construct_object(node)
    except ValueError:  # a number of thousands of digits
        return node.value


def _value(node: Node, as_text: bool) -> Any:
    match node:
        case ScalarNode():
            return _scalar(node, as_text)
        case SequenceNode():
            return [_value(item, as_text) for item in node.value]
        case _:
            return {_name(key): _value(item, as_text) for key, item in node.value}


def _name(key: Node) -> str:
    return (key.value or "''") if isinstance(key, ScalarNode) else "[...]"


def read_value(path: str, text: str) -> Any:
    """The value that a command line gives to a key, read as YAML 1.2 unless the key takes text.

    >>> read_value("optimizer.learning_rate", "3e-4"), read_value("out", "2024")
    (0.0003, '2024')
    >>> read_value("model.hidden", "256,128")
    [256, 128]
    """
    if path in TEXT_KEYS:
        return None if text in ("null", "~") else text
    if path in LIST_KEYS and "," in text and not text.startswith("["):
        text = f"[{text}]"
    try:
        node = _compose(text)
        return None if node is None else _value(node, as_text=False)
    except (YAMLError, RecursionError, ValueError):  # ValueError: no such character, as \U00110000
        return text  # no YAML: the key's own error says what was expected


def _pairs(node: MappingNode, prefix: str = "") -> Iterator[tuple[str, Node | None, int]]:
    """The dotted name, the value's node and the line of each key; a section opens, without node."""
    for key, value in node.value:
        name, line = _name(key), key.start_mark.line + 1
        if not prefix and name in SECTIONS and isinstance(value, MappingNode):
            yield name, None, line
            yield from _pairs(value, f"{name}.")
        else:
            yield prefix + name, value, line


def _source(file: str, root: MappingNode) -> Source:
    source = Source({}, [])
    lines: dict[str, int] = {}
    for path, node, line in _pairs(root):
        label = f"{file}:{line}: {path}"
        if path in lines:
            source.mistakes.append(f"{label}: given twice, first in line {lines[path]}")
            continue
        lines[path] = line
        if node is not None:
            source.entries[path] = Entry(_value(node, path in TEXT_KEYS), label)
    return source


def _text(file: str) -> str:
    try:
        return Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file}: not a text file in UTF-8; expected YAML") from None
    except FileNotFoundError:
        raise UserError(
            f"{file}: no such file; expected a YAML file such as configs/digits_mlp.yaml"
        ) from None
    except IsADirectoryError:
        raise UserError(f"{file}: a folder; expected a YAML file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file}: cannot be read: {reason}") from None


def _root(file: str) -> Node | None:
    try:
        return _compose(_text(file))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise UserError(f"{file}:{mark.line + 1}: not readable: {problem}") from None
    except (YAMLError, ValueError):  # control characters; escapes that are no character
        raise UserError(f"{file}: not a text file; expected YAML") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply; expected keys and sections") from None


def read_file(file: str) -> Source:
    """Reads a configuration file.

    Raises:
        UserError: the file as a whole cannot be read, is no YAML, or holds no keys.
    """
    root = _root(file)
    if root is None:
        raise UserError(f"{file}: empty; expected keys such as steps: 1000")
    if not isinstance(root, MappingNode):
        raise UserError(f"{file}: not keys with values; expected lines such as steps: 1000")
    return _source(file, root)

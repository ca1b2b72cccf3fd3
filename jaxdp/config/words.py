"""What errors and the help text say about keys and values, derived from the schema."""

import types
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from jaxdp.config.keys import KEYS, SECTIONS, section_of
from jaxdp.config.kinds import READS_BYTES

_NOUNS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", ""),
    str: ("text", "texts"),
}
# Names that other trainers use.
_SYNONYMS = {
    "lr": "optimizer.learning_rate",
    "batch_size": "global_batch",
    "epochs": "steps",
    "dtype": "compute_dtype",
    "output_dir": "out",
    "accumulation_steps": "microbatches",
}
_OPTIONS = ("config", "print_config", "help")


def either(words: Iterable[str], last: str = "or") -> str:
    """["a", "b", "c"] -> "a, b or c"."""
    *head, tail = words
    return f"{', '.join(head)} {last} {tail}" if head else tail


def show(value: Any, limit: int = 60) -> str:
    """A value as a user would write it, cut if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        text = f"[{', '.join(show(item) for item in value)}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def bare(value: Any) -> str:
    """Like `show`, without quotes around text."""
    return value if isinstance(value, str) else show(value)


def _bounds(metadata: Sequence[Any]) -> str:
    words = []
    for bound in metadata:
        match bound:
            case Ge(ge=limit):
                words.append(f"at least {limit}")
            case Gt(gt=limit):
                words.append(f"above {limit}")
            case Le(le=limit):
                words.append(f"at most {limit}")
            case Lt(lt=limit):
                words.append(f"below {limit}")
    text = " and ".join(words)
    return f" of {text}" if text.startswith("at ") else f" {text}".rstrip()


def _alternatives(annotation: Any, metadata: Sequence[Any], plural: bool = False) -> list[str]:
    """What a type takes, each alternative in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _alternatives(args[0], args[1:], plural)
    if origin in (Union, types.UnionType):
        return [words for arg in args for words in _alternatives(arg, ())]
    if origin is Literal:
        return [bare(arg) for arg in args]
    if READS_BYTES in metadata:
        return ["a size such as 25M, 512K or 1000000"]
    some = "non-empty " if any(isinstance(item, MinLen) for item in metadata) else ""
    if origin is tuple:
        return [f"a {some}list of {either(_alternatives(args[0], (), plural=True))}"]
    if annotation is type(None):
        return ["null"]
    if annotation is bool:
        return ["true", "false"]
    return [some + _NOUNS[annotation][plural] + _bounds(metadata)]


def expected(field: FieldInfo) -> str:
    """What a field takes, in words: "a whole number of at least 1"."""
    return either(_alternatives(field.annotation, field.metadata))


def wrong_value(field: FieldInfo, value: Any, error: str) -> str:
    """What is wrong with the value of a field (by pydantic's type of error), and what it takes."""
    if error == "finite_number":
        return f"{show(value)} is not finite; expected {expected(field)}"
    if not error.endswith("_type") or field.annotation not in _NOUNS:
        text = f"{show(value)} is not allowed; expected {expected(field)}"
        alone = error == "tuple_type" and isinstance(value, int | str)
        return f"{text}; write [{show(value)}]" if alone else text
    text = f"{show(value)} is not {_NOUNS[field.annotation][0]}"
    if field.annotation is int and isinstance(value, float) and value.is_integer():
        text += f"; write {int(value)}"
    return text


def similar(word: Any, choices: Iterable[str]) -> str:
    """A hint such as "; did you mean adam?", or nothing."""
    close = get_close_matches(str(word), list(choices), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _close(word: str, choices: Iterable[str]) -> list[str]:
    return get_close_matches(word, list(choices), n=1, cutoff=0.7)


def _candidates(path: str) -> list[str]:
    """The keys that may have been meant: spelt otherwise, in another section, misspelt."""
    path = path.replace("-", "_").lower()
    section, _, leaf = path.rpartition(".")
    if path in (*KEYS, *SECTIONS, *_OPTIONS):
        return [path]
    if leaf in _SYNONYMS:
        return [_SYNONYMS[leaf]]
    same_leaf = [key for key in KEYS if key.rpartition(".")[2] == leaf]
    if corrected := [key for key in same_leaf if section_of(key) in _close(section, SECTIONS)]:
        return corrected
    if same_leaf:
        return same_leaf
    if section in SECTIONS:
        return _by_leaf(leaf, section) or _by_leaf(leaf)
    return _close(path, (*KEYS, *SECTIONS, *_OPTIONS)) or _by_leaf(leaf)


def _by_leaf(leaf: str, section: str | None = None) -> list[str]:
    """The keys, of one section or all, whose last part is most like `leaf`."""
    leaves = {key: key.rpartition(".")[2] for key in KEYS if section in (None, section_of(key))}
    close = _close(leaf, leaves.values())
    return [key for key, word in leaves.items() if word in close]


def unknown_key(path: str) -> str:
    """The sentence about a key that does not exist, with a suggestion if there is one."""
    found = _candidates(path)
    return "no such key" + (f"; did you mean {either(found)}?" if found else "")

"""The text of `--help`, made from the schema: every key, its meaning, its type and its default."""

from collections.abc import Iterator
from textwrap import wrap

from pydantic.fields import FieldInfo

from jaxdp.config.keys import DEFAULT_KINDS, KEYS, SECTIONS, section_of
from jaxdp.config.schema import Config
from jaxdp.config.words import bare, either, expected
from jaxdp.errors import Exit

_EXITS = {
    Exit.DONE: "done",
    Exit.BUG: "a bug of ours",
    Exit.USER: "a mistake in the command or the configuration",
    Exit.FAULT_FOUND: "check or compare found a fault",
    Exit.NUMERICS: "non-finite numbers or diverged replicas",
    Exit.STORAGE: "storage",
    Exit.PEER: "a peer is lost or stuck, start again",
    Exit.SAVED: "saved on request, run again",
}

_HEAD = """\
Usage: {prog} [--config FILE] [--KEY VALUE ...]

Reads FILE (YAML 1.2), then the keys of the command line, which win. All keys
have a default unless marked "required". No key is read from the environment;
JAX's own variables (JAX_PLATFORMS, XLA_FLAGS, ...) work as usual.

Examples:
  {prog} --config configs/digits_mlp.yaml
  {prog} --config configs/digits_mlp.yaml \\
      --optimizer.learning_rate 3e-4
  {prog} --model.kind gpt --data.kind stdlib_text
  {prog} --model.hidden 256,128 --devices 8 --resume auto

Options:
  --config FILE
      the configuration file
  --print_config
      print the resolved configuration and leave
  -h, --help
      print this text and leave
"""

Group = tuple[str, ...]  # the kinds for which a key has one meaning and type


def _groups(path: str) -> Iterator[tuple[Group, dict[str, FieldInfo]]]:
    """The fields of a key by kind, put together where they mean the same."""
    meanings: dict[tuple[str | None, str], dict[str, FieldInfo]] = {}
    for kind, field in KEYS[path].items():
        meanings.setdefault((field.description, expected(field)), {})[kind] = field
    for fields in meanings.values():
        yield tuple(fields), fields


def _default(fields: dict[str, FieldInfo]) -> str:
    """The default, or those of the kinds if they differ."""
    kinds: dict[str, list[str]] = {}
    for kind, field in fields.items():
        text = "required" if field.is_required() else f"default {_write(field.default)}"
        kinds.setdefault(text, []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    parts = (f"{text} for {either(of, 'and')}" for text, of in kinds.items())
    return ", ".join(parts).replace(", default ", ", ")


def _write(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else bare(value)


def _paragraph(text: str, width: int, indent: int) -> str:
    lines = wrap(text, width - indent, break_on_hyphens=False)
    return "\n".join(" " * indent + line for line in lines)


def _entry(path: str, fields: dict[str, FieldInfo], width: int) -> str:
    field = next(iter(fields.values()))
    about = f"{field.description} ({expected(field)}; {_default(fields)})"
    return f"  --{path}\n{_paragraph(about, width, 6)}"


def _kind_entry(section: str, width: int) -> str:
    lines = [f"  --{section}.kind", f"      default {DEFAULT_KINDS[section]}; one of"]
    for kind, model in SECTIONS[section].items():
        about = f"{kind}: {model.model_fields['kind'].description}"
        lines.append(_paragraph(about, width, 8))
    return "\n".join(lines)


def _section(section: str, width: int) -> str:
    """The keys of a section: those of all its kinds first, then by the kinds that have them."""
    everywhere = tuple(SECTIONS.get(section, [""]))
    groups: dict[Group, list[str]] = {everywhere: []}
    if section in SECTIONS and everywhere != ("",):
        groups[everywhere].append(_kind_entry(section, width))
    for path in (path for path in KEYS if section_of(path) == section):
        for kinds, fields in _groups(path) if not path.endswith(".kind") else ():
            groups.setdefault(kinds, []).append(_entry(path, fields, width))
    blocks = []
    for kinds, entries in groups.items():
        title = f"For {section}.kind {either(kinds)}:"
        blocks.append("\n".join(entries if kinds == everywhere else ["", f"  {title}", *entries]))
    return "\n".join(blocks)


def help_text(width: int = 80, prog: str = "python -m jaxdp.train") -> str:
    """The help of a program, in lines of at most `width` characters where words allow it."""
    parts = [_HEAD.format(prog=prog), f"The run:\n{_section('', width)}\n"]
    for section in SECTIONS:
        title = f"{section}: {Config.model_fields[section].description}"
        parts.append(f"{title}\n{_section(section, width)}\n")
    exits = ", ".join(f"{code.value} {meaning}" for code, meaning in _EXITS.items())
    parts.append(_paragraph(f"Exit codes: {exits}, 128 + n killed by signal n.", width, 0))
    return "\n".join(parts) + "\n"

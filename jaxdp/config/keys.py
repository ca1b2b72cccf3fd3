"""The dotted names of all keys, taken from the schema: `optimizer.learning_rate` and the like.

A key of a section with kinds may belong to some kinds only, and may differ between them, so a
name maps to one field per kind.  Sections without kinds, and the top level, have the one kind "".
"""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxdp.config.kinds import Section
from jaxdp.config.schema import Config


def _kinds_of(field: FieldInfo) -> dict[str, type[Section]]:
    """The models of a section by kind; none for a plain key."""
    if field.discriminator:
        members = get_args(field.annotation)
        return {get_args(m.model_fields["kind"].annotation)[0]: m for m in members}
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return {"": annotation}
    return {}


SECTIONS: dict[str, dict[str, type[Section]]] = {
    name: kinds for name, field in Config.model_fields.items() if (kinds := _kinds_of(field))
}
DEFAULT_KINDS: dict[str, str] = {
    name: getattr(Config.model_fields[name].default, "kind", "") for name in SECTIONS
}


def _kind_first(model: type[BaseModel]) -> list[str]:
    return sorted(model.model_fields, key=lambda name: name != "kind")


def _all_keys() -> dict[str, dict[str, FieldInfo]]:
    keys: dict[str, dict[str, FieldInfo]] = {}
    for name, field in Config.model_fields.items():
        if name not in SECTIONS:
            keys[name] = {"": field}
        for kind, model in SECTIONS.get(name, {}).items():
            for leaf in _kind_first(model):
                keys.setdefault(f"{name}.{leaf}", {})[kind] = model.model_fields[leaf]
    return keys


KEYS: dict[str, dict[str, FieldInfo]] = _all_keys()


def _mentions(annotation: Any, wanted: type) -> bool:
    """Whether a value of type `wanted` is among those that an annotation allows."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _mentions(args[0], wanted)
    if origin in (Union, types.UnionType):
        return any(_mentions(arg, wanted) for arg in args)
    return annotation is wanted or origin is wanted


def _keys_of_type(wanted: type) -> frozenset[str]:
    return frozenset(
        path
        for path, kinds in KEYS.items()
        if path.rpartition(".")[2] != "kind"
        and any(_mentions(field.annotation, wanted) for field in kinds.values())
    )


TEXT_KEYS = _keys_of_type(str)
LIST_KEYS = _keys_of_type(tuple)
FLAG_KEYS = _keys_of_type(bool)


def fields_of_kinds(kinds: Mapping[str, str]) -> dict[str, FieldInfo]:
    """The fields that exist under a choice of kinds (section -> kind), by dotted name."""
    return {
        path: fields[kind]
        for path, fields in KEYS.items()
        if (kind := kinds.get(section_of(path), "")) in fields
    }


def section_of(path: str) -> str:
    """The section of a dotted name; empty at the top level."""
    return path.rpartition(".")[0]


def flatten(config: Config) -> dict[str, Any]:
    """All values of a configuration by dotted name, in the order of the schema."""
    flat: dict[str, Any] = {}
    for name in Config.model_fields:
        value = getattr(config, name)
        if isinstance(value, Section):
            flat |= {f"{name}.{leaf}": getattr(value, leaf) for leaf in _kind_first(type(value))}
        else:
            flat[name] = value
    return flat

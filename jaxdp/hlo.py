"""Reads a compiled program: which collectives run, how much they carry, and whether in a loop."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxdp.sizes import format_bytes

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip

_MODULE = re.compile(r"^(?=HloModule )", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|(?:called|branch|true|false)_computations?)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclass(frozen=True)
class Collective:
    """A collective instruction of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      result_bytes: size of what it returns on one device.
      in_loop: whether it stands in the body of a loop, and so may run several times a step.
      pairs: (source, destination) of a collective-permute.
    """

    kind: str
    result_bytes: int
    in_loop: bool
    pairs: tuple[tuple[int, int], ...] = ()


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, or of several one after the other.

    Args:
      text: from `compiled.as_text()`.
    """
    # names of computations are a program's own
    return [one for module in _MODULE.split(text) for one in _of_module(module)]


def _of_module(text: str) -> list[Collective]:
    computations = _computations(text)
    looped = _in_loops(computations)
    found = []
    for name, lines in computations.items():
        for line in lines:
            match = _INSTRUCTION.match(line)
            kind = match and match[2].removesuffix("-start")
            if match and kind in KINDS:
                pairs = _PAIRS.search(line)
                numbers = re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if pairs else []
                found.append(
                    Collective(
                        kind,
                        _bytes(match[1], started=match[2].endswith("-start"), kind=kind),
                        name in looped,
                        tuple((int(a), int(b)) for a, b in numbers),
                    )
                )
    return found


def summary(found: list[Collective]) -> list[dict[str, Any]]:
    """One entry for each kind, in a loop or not: kind, in_loop, count, result_bytes in all."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for one in found:
        groups.setdefault((one.kind, one.in_loop), []).append(one.result_bytes)
    return [
        {"kind": kind, "in_loop": in_loop, "count": len(sizes), "result_bytes": sum(sizes)}
        for (kind, in_loop), sizes in groups.items()
    ]


def describe(found: list[Collective]) -> str:
    """In words: `1 all-reduce, 1.2 MB` or `6 collective-permutes, 1.8 MB`."""
    if not found:
        return "no collective"
    counts, sizes = Counter(), Counter()
    for collective in found:
        counts[collective.kind] += 1
        sizes[collective.kind] += collective.result_bytes
    return "; ".join(
        f"{count} {kind}{'s' if count > 1 else ''}, {format_bytes(sizes[kind])}"
        for kind, count in counts.items()
    )


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = found.setdefault(header[1], [])
        else:
            lines.append(line)
    return found


def _in_loops(computations: dict[str, list[str]]) -> set[str]:
    """Names of computations that a while instruction reaches, directly or through calls."""
    reached = {
        called
        for lines in computations.values()
        for line in lines
        if " while(" in line
        for called in _called(line)
    }
    todo = list(reached)
    while todo:
        for line in computations.get(todo.pop(), ()):
            new = _called(line) - reached
            reached |= new
            todo += new
    return reached


def _called(line: str) -> set[str]:
    """Names of the computations that an instruction calls."""
    return {name for group in _CALLED.findall(line) for name in re.findall(r"[\w.\-]+", group)}


_ITEM_BYTES = {"pred": 1, "bf16": 2}


def _bytes(shape: str, *, started: bool, kind: str) -> int:
    parts = _SHAPE.findall(shape)
    if started and kind != "all-reduce" and len(parts) > 1:
        parts = parts[1:2]  # (operand, result, ...)
    total = 0
    for dtype, dims in parts:
        bits = re.search(r"\d+", dtype)
        item = _ITEM_BYTES.get(dtype) or max(1, int(bits[0]) // 8 if bits else 1)
        for dim in filter(None, dims.split(",")):
            item *= int(dim)
        total += item
    return total

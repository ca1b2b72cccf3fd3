"""Before step 1 all processes show each other what they are about to run.

The leaves of the state and the text of the lowered program are lists of lines.  Their digests are
compared; where they differ, so are the lines one by one, and the first that differ are told by
rank.  Without this, a float32 leaf on one rank and an int32 leaf on another are summed to garbage,
without an error.

Nothing of it goes through the devices, which need equal programs themselves.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp import peers
from jaxdp.errors import AgreedError
from jaxdp.runtime.differences import told_by_rank
from jaxdp.trees import named_leaves
from jaxdp.types import PyTree

_LINE_HEX = 8  # of a line's digest: it only says which lines to look at
_MOST_LINES = 4  # told of a subject
_MOST_CHARACTERS = 200


def compare_leaves(tree: PyTree) -> None:
    """Refuses processes whose trees are not of the same leaves: names, order, dtypes, shapes.

    Raises:
      AgreedError: in every process, naming the leaves by rank.
    """
    compare("the leaves of the state", lambda: leaf_lines(tree))


def compare_programs(lowered: Any) -> None:
    """Refuses processes that are about to compile different programs.

    Args:
      lowered: a `jax.stages.Lowered`, or what has its `as_text`.

    Raises:
      AgreedError: in every process, with the first lines that differ by rank.
    """
    compare("the programs of a step", lambda: lowered.as_text().splitlines())


def compare(subject: str, make: Callable[[], Sequence[str]]) -> None:
    """Compares lines over all processes, which call it alike; in one process nothing is done.

    Args:
      subject: what the lines are, in words: a plural.
      make: returns this process's lines.

    Raises:
      AgreedError: in every process, with the first lines that differ by rank.
    """
    if peers.joined() == 1:
        return
    lines = make()
    if len(set(peers.from_all(_digest(lines)))) > 1:
        raise AgreedError(*_differing(subject, lines))


def leaf_lines(tree: PyTree) -> list[str]:
    """The leaves of a tree, in their order: `params/hidden/kernel float32[64,16]`."""
    return [
        f"{name} {np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
        if isinstance(leaf.dtype, np.dtype)
        else f"{name} {leaf.dtype}[{','.join(map(str, leaf.shape))}]"  # a key of jax.random
        for name, leaf in named_leaves(tree)
    ]


def _differing(name: str, lines: Sequence[str]) -> list[str]:
    everybody = [
        [text[i : i + _LINE_HEX] for i in range(0, len(text), _LINE_HEX)]
        for text in peers.from_all("".join(_digest([line])[:_LINE_HEX] for line in lines))
    ]
    longest = max(map(len, everybody))
    padded = [own + [""] * (longest - len(own)) for own in everybody]
    differ = [i for i, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1]
    texts = peers.from_all([_line(lines, i) for i in differ[:_MOST_LINES]])
    told = [
        f"{name} differ in line {i + 1}: {told_by_rank(dict(enumerate(column)))}"
        for i, column in zip(differ, zip(*texts, strict=True), strict=False)
    ]
    more = len(differ) - len(told)
    return told + ([f"{name} differ in {more} more lines"] if more > 0 else [])


def _line(lines: Sequence[str], index: int) -> str:
    return lines[index].strip()[:_MOST_CHARACTERS] if index < len(lines) else "missing"


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

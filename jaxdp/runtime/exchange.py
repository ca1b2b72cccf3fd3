"""Before step 1 all processes show each other what they are about to run.

Each subject is a list of lines: the leaves of the state, the text of the lowered program, keys and
values of a configuration.  Digests are compared; where they differ, so are the lines one by one,
and the first that differ are told by rank.  Without this, a float32 leaf on one rank and an int32
leaf on another are summed to garbage, without an error.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdp.runtime.differences import told_by_rank
from jaxdp.runtime.rollcall import AgreedError
from jaxdp.trees import named_leaves
from jaxdp.types import PyTree

_DIGEST_BYTES = 16
_TEXT_BYTES = 240
_MOST_LINES = 4  # told of a subject
_MISSING = "nothing more"


def compare_processes(subjects: Mapping[str, Sequence[str]]) -> None:
    """Compares lines over all processes; every process calls it with the same subjects.

    Args:
      subjects: name -> lines, which all processes must have in common.

    Raises:
      AgreedError: on every process, where lines differ: which, by rank.
    """
    if jax.process_count() == 1 or not subjects:
        return
    own = np.stack([_digest("\n".join(lines)) for lines in subjects.values()])
    everybody = _gathered(own)
    found: list[str] = []
    # all processes have the same digests before them, and go through the same subjects
    for index, (name, lines) in enumerate(subjects.items()):
        if (everybody[:, index] != everybody[0, index]).any():
            found += _differing(name, lines)
    if found:
        raise AgreedError(*found)


def leaf_lines(tree: PyTree) -> list[str]:
    """The leaves of a tree, in their order: `params/hidden/kernel float32[64,16]`."""
    return [
        f"{name} {np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
        for name, leaf in named_leaves(tree)
    ]


def program_lines(lowered: Any) -> list[str]:
    """The text of a lowered step, `jax.stages.Lowered` or the like."""
    return lowered.as_text().splitlines()


def _differing(name: str, lines: Sequence[str]) -> list[str]:
    counts = _gathered(np.int32(len(lines)))
    longest = int(counts.max())
    digests = np.zeros((longest, _DIGEST_BYTES), np.uint8)
    for index, line in enumerate(lines):
        digests[index] = _digest(line)
    differ = (everybody := _gathered(digests)) != everybody[0]
    first = np.flatnonzero(differ.any((0, 2)))[:_MOST_LINES]
    texts = [lines[i] if i < len(lines) else _MISSING for i in first]
    told = [
        f"{name} differ, line {i + 1}: {told_by_rank(dict(enumerate(texts_of)))}"
        for i, texts_of in zip(first, _gathered_texts(texts), strict=True)
    ]
    more = int(differ.any((0, 2)).sum()) - len(told)
    return told + ([f"{name} differ in {more} more lines"] if more else [])


def _gathered_texts(texts: Sequence[str]) -> list[list[str]]:
    """Of each text, the ranks' versions, cut off where they are long."""
    table = np.zeros((len(texts), _TEXT_BYTES), np.uint8)
    for row, text in zip(table, texts, strict=True):
        data = text.strip().encode()[:_TEXT_BYTES]
        row[: len(data)] = np.frombuffer(data, np.uint8)
    everybody = _gathered(table)
    return [
        [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everybody[:, index]]
        for index in range(len(texts))
    ]


def _digest(text: str) -> np.ndarray:
    data = hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
    return np.frombuffer(data, np.uint8)


def _gathered(x: Any) -> np.ndarray:
    """`[processes, ...]`: every process's array."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(x)))

"""Files of tokens made by a tokeniser beforehand: raw uint16, or with llm.c's header."""

from pathlib import Path

import numpy as np

from jaxdp.data.files import digest, expand, reading
from jaxdp.data.source import Dataset, heldout_count
from jaxdp.data.windows import Windows
from jaxdp.errors import UserError

_MAGIC, _VERSION = 20240520, 1
_HEADER_BYTES = 256 * 4
_CHUNK = 8 << 20  # tokens checked at a time


def load_tokens(
    path: str | Path,
    context: int,
    vocab_size: int | None = None,
    heldout_path: str | Path | None = None,
    heldout_fraction: float | None = None,
) -> Dataset:
    """Token files, memory-mapped, every token checked in one pass (about a second per GB).

    Args:
      path: little-endian uint16 (nanoGPT's `train.bin`), or the same after a header of 256 int32:
        20240520, version 1, the number of tokens, zeros (llm.c's `.bin`).
      context: tokens per example, and targets per example.
      vocab_size: the highest token of all files + 1 by default.
      heldout_path: a file of the same form with the held-out tokens.
      heldout_fraction: or the fraction at the end of `path` that is held out; 0.05 by default.

    Raises:
      UserError: a missing, truncated or damaged file; a token outside of the vocabulary, with its
        file and position; too few tokens for one example.
    """
    if heldout_path is not None and heldout_fraction is not None:
        raise UserError("heldout_path and heldout_fraction are both given: give one of them")
    paths = [expand(p) for p in (path, heldout_path) if p is not None]
    parts = [read_tokens(p) for p in paths]
    vocab_size = _checked_vocabulary(paths, parts, vocab_size)
    facts: dict[str, str | int] = {"path": str(paths[0])}
    if heldout_path is not None:
        facts["heldout_path"] = str(paths[1])
    else:
        fraction = 0.05 if heldout_fraction is None else heldout_fraction
        cut = len(parts[0]) - heldout_count(len(parts[0]), fraction, paths[0])
        parts = [parts[0][:cut], parts[0][cut:]]
    train, heldout = (Windows(parts[i], context, paths[min(i, len(paths) - 1)]) for i in (0, 1))
    facts |= {"train_tokens": len(parts[0]), "heldout_tokens": len(parts[1])}
    facts["sha256"] = digest(*paths)
    return Dataset("tokens", "language", train, heldout, vocab_size, (context,), facts)


def read_tokens(path: Path) -> np.ndarray:
    """The tokens of a file, uint16 [m], memory-mapped, read-only."""
    with reading(path, "a file of uint16 tokens"):
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(_HEADER_BYTES)
        if size == 0:
            raise ValueError("it is empty")
    if start.startswith((b"\x93NUMPY", b"PK\x03\x04")):
        raise UserError(
            f"{path}: a NumPy file; expected raw uint16 tokens: write them with "
            "ids.astype('<u2').tofile(path)"
        )
    offset = _header_bytes(path, start, size)
    if size % 2:
        raise UserError(
            f"{path}: {size} bytes, an odd number; expected 2 for each token; it is truncated "
            f"or of another kind"
        )
    with reading(path, "a file of uint16 tokens"):
        return np.asarray(np.memmap(path, np.dtype("<u2"), "r", offset))


def _header_bytes(path: Path, start: bytes, size: int) -> int:
    """Where the tokens start: after a header that agrees with the file's size, or at 0."""
    words = np.zeros(256, "<i4")
    words[: len(start) // 4] = np.frombuffer(start[: len(start) // 4 * 4], "<i4")
    magic, version, count = words[:3].tolist()
    # 253 zeros in a row are no text: without this a damaged header would be trained on as tokens.
    padded = len(start) == _HEADER_BYTES and not words[3:].any()
    if magic != _MAGIC and not padded:
        return 0
    if (magic, version) != (_MAGIC, _VERSION):
        raise UserError(
            f"{path}: its header says kind {magic}, version {version}; expected {_MAGIC}, version "
            f"{_VERSION} (uint16 tokens); it is damaged, or made for another model"
        )
    if size != _HEADER_BYTES + 2 * count:
        raise UserError(
            f"{path}: its header says {count} tokens and it holds "
            f"{max(0, size - _HEADER_BYTES) / 2}; it is truncated or damaged: copy or make it again"
        )
    return _HEADER_BYTES


def _checked_vocabulary(paths: list[Path], parts: list[np.ndarray], vocab_size: int | None) -> int:
    """The size of the vocabulary, all tokens below it."""
    if vocab_size is not None and vocab_size < 1:
        raise UserError(f"vocab_size is {vocab_size}: give at least 1")
    highest = 0
    for path, tokens in zip(paths, parts, strict=True):
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            highest = max(highest, int(chunk.max()))
            if vocab_size is not None and highest >= vocab_size:
                place = int(np.flatnonzero(chunk >= vocab_size)[0])
                raise UserError(
                    f"{path}: token {chunk[place]} at position {start + place}; expected 0 to "
                    f"{vocab_size - 1}: vocab_size is {vocab_size}; it needs to be that of the "
                    f"tokeniser, or the file is damaged"
                )
    return vocab_size or highest + 1

"""Sizes as people write them, `25M` for 25 x 2**20 bytes, and powers of two."""

_SCALE = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(size: int | str) -> int:
    """Bytes from a whole number, or from text with a unit.

    Raises:
      ValueError: it is neither, or no whole number of bytes.

    >>> parse_bytes("25M"), parse_bytes("0.5K"), parse_bytes(1000)
    (26214400, 512, 1000)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    if not isinstance(size, str):
        raise ValueError(size)
    unit = size[-1:].upper()
    value = float(size[:-1] if unit in _SCALE else size) * _SCALE.get(unit, 1)
    if not value.is_integer():
        raise ValueError(size)
    return int(value)


def format_bytes(count: float) -> str:
    """Bytes with a decimal prefix: `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def is_power_of_two(n: int) -> bool:
    """Whether `n`, at least 1, is 1, 2, 4, ..."""
    return n & n - 1 == 0


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, .. up to `most`."""
    return [1 << bit for bit in range(most.bit_length())]

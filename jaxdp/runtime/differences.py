"""What differs between processes that must agree, told by rank."""

from collections.abc import Mapping

from jaxdp.wording import ranks

_MOST_LINES = 8


def differences(by_rank: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line for each name under which the ranks have different values.

    Args:
      by_rank: rank -> name -> value.

    Returns:
      `jax differs: 0.10.2 on ranks 0, 1; 0.12.0 on rank 2`; the first few, and how many more.
    """
    names = dict.fromkeys(name for values in by_rank.values() for name in values)
    lines = []
    for name in names:
        values = {rank: own.get(name, "missing") for rank, own in by_rank.items()}
        if len(set(values.values())) > 1:
            lines.append(f"{name} differs: {told_by_rank(values)}")
    more = len(lines) - _MOST_LINES
    return lines[:_MOST_LINES] + ([f"and {more} more differences"] if more > 0 else [])


def told_by_rank(values: Mapping[int, str]) -> str:
    """`a on ranks 0, 1; b on rank 2`."""
    holders: dict[str, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    return "; ".join(f"{value} on {ranks(of)}" for value, of in holders.items())

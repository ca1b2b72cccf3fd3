"""Sentences that several programs tell alike."""

from collections.abc import Iterable


def counted(n: int, noun: str) -> str:
    """A number of things: `1 example`, `2 microbatches`."""
    if n == 1:
        return f"1 {noun}"
    if noun == "leaf":
        return f"{n} leaves"
    return f"{n} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


def emulated_devices(n: int, processes: int = 1) -> str:
    """What must be known before any figure of `n` emulated devices is read."""
    where = "one process" if processes == 1 else f"{processes} processes"
    return f"{n} emulated devices in {where}: shared memory, not a network"


def ranks(numbers: Iterable[int]) -> str:
    """Processes by number, in words: `rank 2`, `ranks 0, 1, 4 to 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    alone = len(runs) == 1 and len(runs[0]) == 1
    return f"{'rank' if alone else 'ranks'} {', '.join(parts)}"

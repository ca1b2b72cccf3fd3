"""Sentences that several programs tell alike."""


def counted(n: int, noun: str) -> str:
    """A number of things: `1 example`, `2 microbatches`."""
    if n == 1:
        return f"1 {noun}"
    return f"{n} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


def emulated_devices(n: int, processes: int = 1) -> str:
    """What must be known before any figure of `n` emulated devices is read."""
    where = "one process" if processes == 1 else f"{processes} processes"
    return f"{n} emulated devices in {where}: shared memory, not a network"

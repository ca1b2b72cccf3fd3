"""What processes have to agree on around a checkpoint.  With one process, nothing is sent."""

from jaxdp import peers


def of_the_first(value: int) -> int:
    """What process 0 gave; all have to call this."""
    return peers.from_first(lambda: value)


def any_process(flag: bool) -> bool:
    """Whether one of the processes said so; all have to call this."""
    return any(peers.from_all(flag))

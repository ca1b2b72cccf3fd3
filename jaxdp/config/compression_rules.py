"""What `rules` asks of `sync.compression` and its options: a sentence where they do not fit."""

from jaxdp.config.schema import GATHER_ALGORITHMS, Sync
from jaxdp.config.words import bare, either


def fraction_is_sent(fraction: float, compression: str | None) -> str | None:
    """The fraction belongs to top_k."""
    return _option_of("top_k", "top_k_fraction", fraction, compression)


def rank_is_sent(rank: int, compression: str | None) -> str | None:
    """The rank belongs to power_sgd."""
    return _option_of("power_sgd", "power_sgd_rank", rank, compression)


def _option_of(owner: str, name: str, value: float, compression: str | None) -> str | None:
    # The default is let through: a resolved configuration writes out every key.
    if compression == owner or value == Sync.model_fields[name].default:
        return None
    return (
        f"{value} has no effect with sync.compression {bare(compression)}; "
        f"set sync.compression {owner}"
    )


def replaces_wire_and_buckets(
    compression: str | None, wire: str, bucket_bytes: int | str | None
) -> str | None:
    """A compression has messages of its own."""
    if compression is None or (wire == "float32" and bucket_bytes is None):
        return None
    other = f"sync.wire {wire}" if wire != "float32" else f"sync.bucket_bytes {bucket_bytes}"
    return (
        f"{compression} cannot be combined with {other}: what it sends is float32, in messages "
        "of its own; remove one of them"
    )


def has_gradients(
    compression: str | None, shard_optimizer: bool, local_steps: int | None
) -> str | None:
    """It compresses the sum of whole gradients, every step."""
    if compression is None or (not shard_optimizer and local_steps is None):
        return None
    other = (
        "sync.shard_optimizer, whose devices sum only their shares"
        if shard_optimizer
        else "sync.local_steps, whose devices send parameters"
    )
    return f"{compression} cannot be combined with {other}; remove one of them"


def is_carried(compression: str | None, algorithm: str) -> str | None:
    """Top-k is gathered; nothing is chosen for it."""
    if compression == "top_k" and algorithm not in GATHER_ALGORITHMS:
        return (
            f"top_k gathers what devices send, which sync.algorithm {algorithm} cannot; "
            f"set sync.algorithm {either(GATHER_ALGORITHMS)}"
        )
    if compression is not None and algorithm == "auto":
        return (
            f"{compression} cannot be combined with sync.algorithm auto, which chooses for whole "
            "gradients; name an algorithm"
        )
    return None

"""What goes together with `sync.logical_shards`: checks for `rules.py`.

Each gets the value of a key and the number of logical shards, and says what is wrong with the key.
"""

from typing import Literal

from jaxdp.config.schema import Sync
from jaxdp.config.words import either
from jaxdp.sizes import is_power_of_two, powers_of_two


def doubles(shards: int | None) -> str | None:
    """S shards are added in a whole binary tree."""
    if shards is None or is_power_of_two(shards):
        return None
    below = 1 << shards.bit_length() - 1
    return f"{shards} is no power of two; the nearest valid values are {below} and {2 * below}"


def devices_share(devices: int | Literal["auto"], shards: int | None) -> str | None:
    """Every device has as many shards, which are a whole subtree."""
    if devices == "auto" or shards is None or not is_power_of_two(shards):
        return None
    valid = powers_of_two(shards)
    if devices in valid:
        return None
    expected = either(map(str, valid))
    return f"{devices} cannot share sync.logical_shards = {shards}; expected {expected}"


def adds_in_a_tree(algorithm: str, shards: int | None) -> str | None:
    """Recursive doubling goes on with the tree; what is chosen by default gives way to it."""
    # The default is let through: a resolved configuration writes out every key.
    default = Sync.model_fields["algorithm"].default
    if shards is None or algorithm in (default, "recursive_doubling"):
        return None
    return (
        f"{algorithm} adds in another order than sync.logical_shards; "
        "set sync.algorithm recursive_doubling"
    )


def has_no_effect(bucket_bytes: int | str | None, shards: int | None) -> str | None:
    """The sums of a shard are one bucket."""
    if bucket_bytes is None or shards is None:
        return None
    return f"{bucket_bytes} has no effect with sync.logical_shards; remove one of them"


def is_another_algorithm(local_steps: int | None, shards: int | None) -> str | None:
    """Local steps depend on the number of devices."""
    if local_steps is None or shards is None:
        return None
    return f"{local_steps} gives other results on other devices; remove sync.logical_shards"


def is_whole(shard_optimizer: bool, shards: int | None) -> str | None:
    """Every device runs the same update."""
    if not shard_optimizer or shards is None:
        return None
    return "true updates other parts on other devices; remove sync.logical_shards"


def is_exact(wire: str, shards: int | None) -> str | None:
    """What travels depends on the number of devices, and so would its rounding."""
    if wire == "float32" or shards is None:
        return None
    return (
        f"{wire} rounds on the way, by the number of devices; "
        "set sync.wire float32 with sync.logical_shards"
    )


def sends_everything(compression: str | None, shards: int | None) -> str | None:
    """What each device keeps back depends on their number."""
    if compression is None or shards is None:
        return None
    return (
        f"{compression} keeps back other parts on other devices; remove it, or sync.logical_shards"
    )


def normalises_alone(batch_norm: str, shards: int | None) -> str | None:
    """Shards are computed one by one."""
    if batch_norm != "sync" or shards is None:
        return None
    return (
        "sync needs all devices at once, but with sync.logical_shards each shard is computed by "
        "itself; set model.batch_norm local"
    )

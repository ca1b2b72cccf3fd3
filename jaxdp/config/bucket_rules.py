"""What `rules` asks of buckets and what is there for them: a sentence where they do not fit."""

from jaxdp.sizes import parse_bytes


def first_fits(first: int | str | None, cap: int | str | None) -> str | None:
    """The first bucket is the small one."""
    if first is None:
        return None
    if cap is None:
        return f"{first} has no effect without sync.bucket_bytes; set both, or none"
    if parse_bytes(first) <= parse_bytes(cap):
        return None
    return f"{first} is more than sync.bucket_bytes = {cap}; expected at most that"


def one_message(shard_optimizer: bool, bucket_bytes: int | str | None) -> str | None:
    """Shares of the optimizer are not cut into buckets."""
    if not shard_optimizer or bucket_bytes is None:
        return None
    return f"true sends all gradients at once: remove sync.bucket_bytes = {bucket_bytes}"


def is_peeled_for(
    peel_last: bool | None,
    microbatches: int,
    bucket_bytes: int | str | None,
    local_steps: int | None,
) -> str | None:
    """A last microbatch, and buckets that can travel during its backward pass."""
    if not peel_last:
        return None
    if microbatches == 1:
        return "true has no effect with microbatches 1; expected 2 or more"
    if bucket_bytes is None:
        return "true has no effect without sync.bucket_bytes; set both, or none"
    if local_steps is not None:
        return "true has no effect with sync.local_steps; remove one of them"
    return None

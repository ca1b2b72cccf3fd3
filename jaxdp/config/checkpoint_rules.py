"""The rules about checkpoints: which are kept, and how often."""

from typing import Literal

from jaxdp.config.schema import Checkpoint

Interval = int | Literal["auto"]


def is_there_to_go_back_to(policy: str, every: Interval) -> str | None:
    if policy != "rollback" or every:
        return None
    return "rollback needs checkpoints to go back to; set checkpoint.every above 0"


def best_is_evaluated(best: str | None, every: Interval, eval_every: int) -> str | None:
    if best is None:
        return None
    if every == 0:
        return f"{best} has no effect with checkpoint.every 0: there is one checkpoint"
    if eval_every == 0:
        return f"{best} needs evaluations; set eval.every above 0"
    if every == "auto" or every % eval_every == 0:
        return None
    return (
        f"{best} needs an evaluation at each save; expected checkpoint.every = {every} to be a "
        f"multiple of eval.every = {eval_every}"
    )


def has_more_than_one(keep_every: int | None, every: Interval) -> str | None:
    if keep_every is None or every:
        return None
    return f"{keep_every} has no effect with checkpoint.every 0: there is one checkpoint"


def failures_are_counted(hours: float, every: Interval) -> str | None:
    # The default is let through: a resolved configuration writes out every key.
    default = Checkpoint.model_fields["mean_time_to_failure"].default
    if every == "auto" or hours == default:
        return None
    return f"{hours} has no effect with checkpoint.every {every}; set checkpoint.every auto"

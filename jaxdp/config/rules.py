"""The rules that read several keys at once.

A rule names the keys that it reads, so that it can be run, and reported, beside faults in others:
it is skipped only if one of its own keys is faulty or does not exist for the chosen kinds.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jaxdp.config import bucket_rules, shard_rules
from jaxdp.config.checkpoint_rules import (
    best_is_evaluated,
    failures_are_counted,
    has_more_than_one,
    is_there_to_go_back_to,
)
from jaxdp.config.compression_rules import (
    fraction_is_sent,
    has_gradients,
    is_carried,
    rank_is_sent,
    replaces_wire_and_buckets,
)
from jaxdp.config.keys import SECTIONS, flatten
from jaxdp.config.schema import HALVED_ALGORITHMS, INT8_ALGORITHMS, Config, Guard, Sync
from jaxdp.config.words import either
from jaxdp.sizes import is_power_of_two


class Rule(NamedTuple):
    """`check` gets the values of the keys `reads`, in this order, and says what is wrong.

    The sentence is about the first key: it is printed behind its name.
    """

    reads: tuple[str, ...]
    check: Callable[..., str | None]


def _nearest(value: int, divisor: int) -> str:
    """The multiples of `divisor` next to a value that is none."""
    below = value - value % divisor
    if not below:
        return f"the nearest valid value is {divisor}"
    return f"the nearest valid values are {below} and {below + divisor}"


def _batch_splits(
    global_batch: int,
    microbatches: int,
    devices: int | Literal["auto"],
    local_steps: int | None,
    shards: int | None,
) -> str | None:
    factors = {"microbatches": microbatches}
    if shards is not None and is_power_of_two(shards):  # a multiple of devices
        factors["sync.logical_shards"] = shards
    elif devices != "auto":  # whatever their number will be, the others have to divide
        factors["devices"] = devices
    if local_steps is not None:
        factors["sync.local_steps"] = local_steps
    parts = math.prod(factors.values())
    if global_batch % parts == 0:
        return None
    product = [" x ".join(factors), " x ".join(map(str, factors.values())), str(parts)]
    equation = " = ".join(dict.fromkeys(product))  # one factor is the product
    return f"{global_batch} is not divisible by {equation}; {_nearest(global_batch, parts)}"


def _eval_batch_splits(batch: int | None, devices: int | Literal["auto"]) -> str | None:
    if batch is None or devices == "auto" or batch % devices == 0:
        return None
    return f"{batch} is not divisible by devices = {devices}; {_nearest(batch, devices)}"


def _tasks_match(data_kind: str, model_kind: str) -> str | None:
    models, data = SECTIONS["model"], SECTIONS["data"]
    task = models[model_kind].task
    fitting = [kind for kind, section in data.items() if section.task == task]
    if data_kind in fitting:
        return None
    models = [kind for kind, section in models.items() if section.task == data[data_kind].task]
    return (
        f"{data_kind} does not fit model.kind {model_kind}; expected {either(fitting)}, "
        f"or model.kind {either(models)}"
    )


def _heads_divide_width(width: int, heads: int) -> str | None:
    if width % heads == 0:
        return None
    return f"{width} is not divisible by model.heads = {heads}; {_nearest(width, heads)}"


def _rotary_pairs(width: int, heads: int, positions: str) -> str | None:
    if positions != "rotary" or width % heads or width // heads % 2 == 0:
        return None
    return (
        f"{width} / model.heads = {width} / {heads} = {width // heads} is odd, but positions "
        f"rotary turns pairs; {_nearest(width, 2 * heads)}"
    )


def _warmup_ends(warmup_steps: int, steps: int) -> str | None:
    if warmup_steps < steps:
        return None
    return (
        f"{warmup_steps} is not shorter than the run; expected fewer than steps = {steps}: a short "
        f"run needs a short warm-up, such as optimizer.warmup_steps {steps // 10}"
    )


def _end_is_used(end_fraction: float, schedule: str) -> str | None:
    # The default 0 is let through: a resolved configuration writes out every key.
    if not end_fraction or schedule != "constant":
        return None
    return f"{end_fraction} has no effect with schedule constant; set schedule cosine or linear"


def _nesterov_is_used(nesterov: bool, momentum: float) -> str | None:
    return "true has no effect with momentum 0" if nesterov and not momentum else None


def _fraction_is_used(fraction: float, kind: str, heldout_path: str | None) -> str | None:
    default = SECTIONS["data"][kind].model_fields["heldout_fraction"].default
    if heldout_path is None or fraction == default:
        return None
    return f"{fraction} has no effect, since data.heldout_path is given; remove one of them"


def _only_auto_tunes(value: str | None, algorithm: str) -> str | None:
    if value in (None, "file") or algorithm == "auto":
        return None
    return f"{value} has no effect with sync.algorithm {algorithm}; set sync.algorithm auto"


def _file_is_read(tune_file: str | None, tune: str) -> str | None:
    if tune_file is None or tune == "file":
        return None
    return f"{tune_file} has no effect with sync.tune {tune}; remove one of them"


def _wire_is_carried(wire: str, algorithm: str) -> str | None:
    if wire != "int8" or algorithm in INT8_ALGORITHMS:
        return None
    return (
        f"int8 cannot be added on the way, as sync.algorithm {algorithm} does; "
        f"set sync.algorithm {either(INT8_ALGORITHMS)}, or another wire"
    )


def _outer_is_used(path: str) -> Callable[[float, int | None], str | None]:
    default = Sync.model_fields[path].default

    def check(value: float, local_steps: int | None) -> str | None:
        # The default is let through: a resolved configuration writes out every key.
        if value == default or local_steps is not None:
            return None
        return f"{value} has no effect without sync.local_steps; set both, or none"

    return check


def _normalises_apart(batch_norm: str, local_steps: int | None) -> str | None:
    if local_steps is None or batch_norm == "local":
        return None
    return (
        f"{batch_norm} sums over devices, which have parameters of their own during "
        "sync.local_steps; set model.batch_norm local"
    )


def _shards_no_inner_state(local_steps: int | None, shard_optimizer: bool) -> str | None:
    if local_steps is None or not shard_optimizer:
        return None
    return (
        f"{local_steps} gives each device an optimizer of its own, which has no shares: remove "
        "sync.shard_optimizer"
    )


def _has_halves(algorithm: str, shard_optimizer: bool) -> str | None:
    if not shard_optimizer or algorithm in HALVED_ALGORITHMS:
        return None
    return (
        f"{algorithm} has no reduce-scatter, which sync.shard_optimizer needs; "
        f"expected {either(HALVED_ALGORITHMS)}"
    )


def _is_elementwise(shard_optimizer: bool, kind: str) -> str | None:
    if not shard_optimizer or kind != "adafactor":
        return None
    return "true needs an optimizer that works element by element, and adafactor does not"


def _compares(divergence: str, every: int) -> str | None:
    if divergence == "stop" or every:
        return None
    return f"{divergence} has no effect with guard.every 0; expected guard.every above 0"


def _limit_is_used(limit: int, nonfinite: str) -> str | None:
    # The default is let through: a resolved configuration writes out every key.
    if nonfinite != "stop" or limit == Guard.model_fields["limit"].default:
        return None
    return f"{limit} has no effect with guard.nonfinite stop; set guard.nonfinite skip or rollback"


DEVICE_RULES = (
    Rule(
        ("global_batch", "microbatches", "devices", "sync.local_steps", "sync.logical_shards"),
        _batch_splits,
    ),
    Rule(("devices", "sync.logical_shards"), shard_rules.devices_share),
    Rule(("eval.batch", "devices"), _eval_batch_splits),
)
RULES = (
    *DEVICE_RULES,
    Rule(("data.kind", "model.kind"), _tasks_match),
    Rule(("model.width", "model.heads"), _heads_divide_width),
    Rule(("model.width", "model.heads", "model.positions"), _rotary_pairs),
    Rule(("optimizer.warmup_steps", "steps"), _warmup_ends),
    Rule(("optimizer.end_fraction", "optimizer.schedule"), _end_is_used),
    Rule(("optimizer.nesterov", "optimizer.momentum"), _nesterov_is_used),
    Rule(("sync.tune", "sync.algorithm"), _only_auto_tunes),
    Rule(("sync.tune_file", "sync.algorithm"), _only_auto_tunes),
    Rule(("sync.tune_file", "sync.tune"), _file_is_read),
    Rule(("sync.first_bucket_bytes", "sync.bucket_bytes"), bucket_rules.first_fits),
    Rule(
        ("sync.peel_last", "microbatches", "sync.bucket_bytes", "sync.local_steps"),
        bucket_rules.is_peeled_for,
    ),
    Rule(("sync.wire", "sync.algorithm"), _wire_is_carried),
    Rule(("sync.top_k_fraction", "sync.compression"), fraction_is_sent),
    Rule(("sync.power_sgd_rank", "sync.compression"), rank_is_sent),
    Rule(("sync.compression", "sync.wire", "sync.bucket_bytes"), replaces_wire_and_buckets),
    Rule(("sync.compression", "sync.shard_optimizer", "sync.local_steps"), has_gradients),
    Rule(("sync.compression", "sync.algorithm"), is_carried),
    Rule(("sync.outer_learning_rate", "sync.local_steps"), _outer_is_used("outer_learning_rate")),
    Rule(("sync.outer_momentum", "sync.local_steps"), _outer_is_used("outer_momentum")),
    Rule(("sync.local_steps", "sync.shard_optimizer"), _shards_no_inner_state),
    Rule(("model.batch_norm", "sync.local_steps"), _normalises_apart),
    Rule(("sync.algorithm", "sync.shard_optimizer"), _has_halves),
    Rule(("sync.shard_optimizer", "sync.bucket_bytes"), bucket_rules.one_message),
    Rule(("sync.shard_optimizer", "optimizer.kind"), _is_elementwise),
    Rule(("sync.logical_shards",), shard_rules.doubles),
    Rule(("sync.algorithm", "sync.logical_shards"), shard_rules.adds_in_a_tree),
    Rule(("sync.bucket_bytes", "sync.logical_shards"), shard_rules.has_no_effect),
    Rule(("sync.local_steps", "sync.logical_shards"), shard_rules.is_another_algorithm),
    Rule(("sync.shard_optimizer", "sync.logical_shards"), shard_rules.is_whole),
    Rule(("sync.wire", "sync.logical_shards"), shard_rules.is_exact),
    Rule(("sync.compression", "sync.logical_shards"), shard_rules.sends_everything),
    Rule(("model.batch_norm", "sync.logical_shards"), shard_rules.normalises_alone),
    Rule(("guard.divergence", "checkpoint.every"), is_there_to_go_back_to),
    Rule(("guard.nonfinite", "checkpoint.every"), is_there_to_go_back_to),
    Rule(("checkpoint.keep_best", "checkpoint.every", "eval.every"), best_is_evaluated),
    Rule(("checkpoint.keep_every", "checkpoint.every"), has_more_than_one),
    Rule(("checkpoint.mean_time_to_failure", "checkpoint.every"), failures_are_counted),
    Rule(("guard.divergence", "guard.every"), _compares),
    Rule(("guard.limit", "guard.nonfinite"), _limit_is_used),
    Rule(("data.heldout_fraction", "data.kind", "data.heldout_path"), _fraction_is_used),
)


def broken_rules(
    values: Mapping[str, Any], rules: tuple[Rule, ...] = RULES
) -> list[tuple[str, str]]:
    """The key and the sentence of each broken rule, among those whose keys all have a value."""
    return [
        (rule.reads[0], text)
        for rule in rules
        if all(path in values for path in rule.reads)
        and (text := rule.check(*(values[path] for path in rule.reads)))
    ]


def check_devices(config: Config, n_devices: int) -> list[str]:
    """Whether the batches can be spread over `n_devices`, once `devices: auto` was counted.

    Args:
        config: a valid configuration.
        n_devices: devices over all processes.

    Returns:
        A line for each batch that cannot, with the nearest valid values; empty if all is well.
    """
    values = flatten(config) | {"devices": n_devices}
    return [f"{path}: {text}" for path, text in broken_rules(values, DEVICE_RULES)]

"""The rules over several keys."""

import random

import pytest

from jaxdp.collectives import algorithms_for
from jaxdp.config import Config, check_devices, flatten
from jaxdp.config.keys import KEYS
from jaxdp.config.kinds import (
    Adafactor,
    Digits,
    Gpt,
    Momentum,
    Npz,
    Resnet,
    Sgd,
    TextFile,
    Tokens,
)
from jaxdp.config.rules import RULES, broken_rules
from jaxdp.config.schema import HALVED_ALGORITHMS, Checkpoint, Eval, Guard, Sync


def broken(**keys) -> list[str]:
    return [f"{path}: {text}" for path, text in broken_rules(flatten(Config(**keys)))]


def test_rules_read_existing_keys():
    assert {path for rule in RULES for path in rule.reads} <= set(KEYS)


def test_halved_algorithms_are_those_of_the_library():
    gathering = algorithms_for("all_gather")
    both = [name for name in algorithms_for("reduce_scatter") if name in gathering]
    assert set(HALVED_ALGORITHMS) == set(both)


def test_defaults_break_nothing():
    assert broken() == []


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"devices": 5, "global_batch": 96},
            "global_batch: 96 is not divisible by microbatches x devices = 1 x 5 = 5; "
            "the nearest valid values are 95 and 100",
        ),
        (
            {"devices": 8, "microbatches": 2, "global_batch": 3},
            "global_batch: 3 is not divisible by microbatches x devices = 2 x 8 = 16; "
            "the nearest valid value is 16",
        ),
        (
            {"microbatches": 5},
            "global_batch: 96 is not divisible by microbatches = 5; "
            "the nearest valid values are 95 and 100",
        ),
        (
            {"devices": 4, "eval": Eval(batch=6)},
            "eval.batch: 6 is not divisible by devices = 4; the nearest valid values are 4 and 8",
        ),
        (
            {"sync": Sync(algorithm="tree", shard_optimizer=True)},
            "sync.algorithm: tree has no reduce-scatter, which sync.shard_optimizer needs; "
            "expected psum, ring, bidirectional_ring, halving_doubling, hierarchical or all_to_all",
        ),
        (
            {"sync": Sync(shard_optimizer=True, bucket_bytes=1000)},
            "sync.shard_optimizer: true sends all gradients at once: remove "
            "sync.bucket_bytes = 1000",
        ),
        (
            {"sync": Sync(shard_optimizer=True), "optimizer": Adafactor()},
            "sync.shard_optimizer: true needs an optimizer that works element by element, and "
            "adafactor does not",
        ),
        (
            {"model": Gpt(), "data": Digits()},
            "data.kind: digits does not fit model.kind gpt; "
            "expected stdlib_text, text_file or tokens, or model.kind mlp, cnn or resnet",
        ),
        (
            {"data": TextFile(path="a")},
            "data.kind: text_file does not fit model.kind mlp; "
            "expected digits, fashion_mnist, npz or npy, or model.kind gpt",
        ),
        (
            {"model": Gpt(width=130), "data": TextFile(path="a")},
            "model.width: 130 is not divisible by model.heads = 4; "
            "the nearest valid values are 128 and 132",
        ),
        (
            {"model": Gpt(width=12), "data": TextFile(path="a")},
            "model.width: 12 / model.heads = 12 / 4 = 3 is odd, but positions rotary turns pairs; "
            "the nearest valid values are 8 and 16",
        ),
        (
            {"optimizer": Sgd(warmup_steps=10), "steps": 10},
            "optimizer.warmup_steps: 10 is not shorter than the run; "
            "expected fewer than steps = 10: a short run needs a short warm-up, such as "
            "optimizer.warmup_steps 1",
        ),
        (
            {"optimizer": Sgd(end_fraction=0.1)},
            "optimizer.end_fraction: 0.1 has no effect with schedule constant; "
            "set schedule cosine or linear",
        ),
        (
            {"optimizer": Momentum(momentum=0.0, nesterov=True)},
            "optimizer.nesterov: true has no effect with momentum 0",
        ),
        (
            {"sync": Sync(first_bucket_bytes=5)},
            "sync.first_bucket_bytes: 5 has no effect without sync.bucket_bytes; set both, or none",
        ),
        (
            {"sync": Sync(bucket_bytes=4, first_bucket_bytes=5)},
            "sync.first_bucket_bytes: 5 is more than sync.bucket_bytes = 4; expected at most that",
        ),
        (
            {"sync": Sync(peel_last=True, bucket_bytes=4)},
            "sync.peel_last: true has no effect with microbatches 1; expected 2 or more",
        ),
        (
            {"sync": Sync(peel_last=True), "microbatches": 2},
            "sync.peel_last: true has no effect without sync.bucket_bytes; set both, or none",
        ),
        (
            {"sync": Sync(peel_last=True, bucket_bytes=4, local_steps=2), "microbatches": 2},
            "sync.peel_last: true has no effect with sync.local_steps; remove one of them",
        ),
        (
            {"sync": Sync(wire="int8", algorithm="ring")},
            "sync.wire: int8 cannot be added on the way, as sync.algorithm ring does; "
            "set sync.algorithm psum, all_to_all or all_gather_sum, or another wire",
        ),
        (
            {"sync": Sync(top_k_fraction=0.1)},
            "sync.top_k_fraction: 0.1 has no effect with sync.compression null; "
            "set sync.compression top_k",
        ),
        (
            {"sync": Sync(compression="top_k", power_sgd_rank=2)},
            "sync.power_sgd_rank: 2 has no effect with sync.compression top_k; "
            "set sync.compression power_sgd",
        ),
        (
            {"sync": Sync(compression="top_k", wire="bfloat16")},
            "sync.compression: top_k cannot be combined with sync.wire bfloat16: what it sends is "
            "float32, in messages of its own; remove one of them",
        ),
        (
            {"sync": Sync(compression="power_sgd", bucket_bytes=5)},
            "sync.compression: power_sgd cannot be combined with sync.bucket_bytes 5: what it "
            "sends is float32, in messages of its own; remove one of them",
        ),
        (
            {"sync": Sync(compression="top_k", algorithm="tree")},
            "sync.compression: top_k gathers what devices send, which sync.algorithm tree cannot; "
            "set sync.algorithm psum, ring, bidirectional_ring, hierarchical or all_to_all",
        ),
        (
            {"sync": Sync(compression="power_sgd", algorithm="auto")},
            "sync.compression: power_sgd cannot be combined with sync.algorithm auto, which "
            "chooses for whole gradients; name an algorithm",
        ),
        (
            {"sync": Sync(compression="top_k", shard_optimizer=True)},
            "sync.compression: top_k cannot be combined with sync.shard_optimizer, whose devices "
            "sum only their shares; remove one of them",
        ),
        (
            {"sync": Sync(compression="power_sgd", local_steps=2)},
            "sync.compression: power_sgd cannot be combined with sync.local_steps, whose devices "
            "send parameters; remove one of them",
        ),
        (
            {"sync": Sync(local_steps=5), "devices": 4},
            "global_batch: 96 is not divisible by microbatches x devices x sync.local_steps = "
            "1 x 4 x 5 = 20; the nearest valid values are 80 and 100",
        ),
        (
            {"sync": Sync(local_steps=7)},
            "global_batch: 96 is not divisible by microbatches x sync.local_steps = 1 x 7 = 7; "
            "the nearest valid values are 91 and 98",
        ),
        (
            {"sync": Sync(local_steps=2, shard_optimizer=True)},
            "sync.local_steps: 2 gives each device an optimizer of its own, which has no shares: "
            "remove sync.shard_optimizer",
        ),
        (
            {"sync": Sync(outer_momentum=0.9)},
            "sync.outer_momentum: 0.9 has no effect without sync.local_steps; set both, or none",
        ),
        (
            {"sync": Sync(outer_learning_rate=0.7)},
            "sync.outer_learning_rate: 0.7 has no effect without sync.local_steps; "
            "set both, or none",
        ),
        (
            {"sync": Sync(local_steps=2), "model": Resnet()},
            "model.batch_norm: sync sums over devices, which have parameters of their own during "
            "sync.local_steps; set model.batch_norm local",
        ),
        (
            {"sync": Sync(logical_shards=6)},
            "sync.logical_shards: 6 is no power of two; the nearest valid values are 4 and 8",
        ),
        (
            {"sync": Sync(logical_shards=8), "devices": 16},
            "devices: 16 cannot share sync.logical_shards = 8; expected 1, 2, 4 or 8",
        ),
        (
            {"sync": Sync(logical_shards=8), "microbatches": 3, "global_batch": 100},
            "global_batch: 100 is not divisible by microbatches x sync.logical_shards = 3 x 8 = 24;"
            " the nearest valid values are 96 and 120",
        ),
        (
            {"sync": Sync(logical_shards=8, algorithm="ring")},
            "sync.algorithm: ring adds in another order than sync.logical_shards; "
            "set sync.algorithm recursive_doubling",
        ),
        (
            {"sync": Sync(logical_shards=8, bucket_bytes=5)},
            "sync.bucket_bytes: 5 has no effect with sync.logical_shards; remove one of them",
        ),
        (
            {"sync": Sync(logical_shards=8, local_steps=3)},
            "sync.local_steps: 3 gives other results on other devices; remove sync.logical_shards",
        ),
        (
            {"sync": Sync(logical_shards=8, compression="top_k")},
            "sync.compression: top_k keeps back other parts on other devices; "
            "remove it, or sync.logical_shards",
        ),
        (
            {"sync": Sync(logical_shards=8, shard_optimizer=True)},
            "sync.shard_optimizer: true updates other parts on other devices; "
            "remove sync.logical_shards",
        ),
        (
            {"sync": Sync(logical_shards=8, wire="bfloat16")},
            "sync.wire: bfloat16 rounds on the way, by the number of devices; "
            "set sync.wire float32 with sync.logical_shards",
        ),
        (
            {"sync": Sync(logical_shards=8), "model": Resnet()},
            "model.batch_norm: sync needs all devices at once, but with sync.logical_shards each "
            "shard is computed by itself; set model.batch_norm local",
        ),
        (
            {"data": Npz(path="a", heldout_path="b", heldout_fraction=0.2)},
            "data.heldout_fraction: 0.2 has no effect, since data.heldout_path is given; "
            "remove one of them",
        ),
        (
            {"guard": Guard(divergence="rollback")},
            "guard.divergence: rollback needs checkpoints to go back to; "
            "set checkpoint.every above 0",
        ),
        (
            {"guard": Guard(nonfinite="rollback")},
            "guard.nonfinite: rollback needs checkpoints to go back to; "
            "set checkpoint.every above 0",
        ),
        (
            {"checkpoint": Checkpoint(keep_best="loss"), "eval": Eval(every=5)},
            "checkpoint.keep_best: loss has no effect with checkpoint.every 0: there is one "
            "checkpoint",
        ),
        (
            {"checkpoint": Checkpoint(every="auto", keep_best="loss")},
            "checkpoint.keep_best: loss needs evaluations; set eval.every above 0",
        ),
        (
            {"checkpoint": Checkpoint(every=8, keep_best="accuracy"), "eval": Eval(every=12)},
            "checkpoint.keep_best: accuracy needs an evaluation at each save; expected "
            "checkpoint.every = 8 to be a multiple of eval.every = 12",
        ),
        (
            {"checkpoint": Checkpoint(keep_every=100)},
            "checkpoint.keep_every: 100 has no effect with checkpoint.every 0: there is one "
            "checkpoint",
        ),
        (
            {"checkpoint": Checkpoint(every=100, mean_time_to_failure=2.0)},
            "checkpoint.mean_time_to_failure: 2.0 has no effect with checkpoint.every 100; set "
            "checkpoint.every auto",
        ),
        (
            {"guard": Guard(divergence="rollback", every=0), "checkpoint": Checkpoint(every=5)},
            "guard.divergence: rollback has no effect with guard.every 0; "
            "expected guard.every above 0",
        ),
        (
            {"guard": Guard(limit=3)},
            "guard.limit: 3 has no effect with guard.nonfinite stop; "
            "set guard.nonfinite skip or rollback",
        ),
    ],
)
def test_broken_rule(keys, line):
    assert broken(**keys) == [line]


@pytest.mark.parametrize(
    "keys",
    [
        {"model": Gpt(width=12, positions="learned"), "data": TextFile(path="a")},
        {"optimizer": Sgd(warmup_steps=9, schedule="cosine", end_fraction=0.1), "steps": 10},
        {"eval": Eval(every=10), "checkpoint": Checkpoint(every=10), "steps": 10},
        {"data": Tokens(path="a", heldout_path="b"), "model": Gpt()},
        {"guard": Guard(every=0, nonfinite="skip", limit=9)},
        {
            "guard": Guard(divergence="rollback", nonfinite="rollback", limit=1),
            "checkpoint": Checkpoint(every=5),
        },
        {
            "checkpoint": Checkpoint(
                every="auto", keep_best="loss", keep_every=7, mean_time_to_failure=0.5
            ),
            "eval": Eval(every=5),
            "guard": Guard(nonfinite="rollback"),
        },
        {"checkpoint": Checkpoint(every=10, keep_best="accuracy"), "eval": Eval(every=5)},
        {"devices": 8, "eval": Eval(batch=8), "microbatches": 2},
        {"sync": Sync(bucket_bytes=5, first_bucket_bytes=5)},
        {
            "sync": Sync(local_steps=4, outer_learning_rate=0.7, outer_momentum=0.9),
            "model": Resnet(batch_norm="local"),
            "devices": 8,
        },
        {"sync": Sync(wire="bfloat16", algorithm="auto")},
        {"sync": Sync(compression="top_k", top_k_fraction=1, algorithm="ring")},
        {"sync": Sync(compression="power_sgd", power_sgd_rank=1, algorithm="double_tree")},
        {"sync": Sync(logical_shards=8, algorithm="recursive_doubling"), "devices": 4},
        {"sync": Sync(logical_shards=2), "model": Resnet(batch_norm="local")},
    ],
)
def test_kept_rules(keys):
    assert broken(**keys) == []


def test_rules_with_faulty_keys_are_skipped():
    values = flatten(Config(devices=5, optimizer=Sgd(warmup_steps=1000)))
    del values["microbatches"]
    assert [path for path, _ in broken_rules(values)] == ["optimizer.warmup_steps"]


def test_check_devices_counts_what_auto_left_open():
    config = Config(eval=Eval(batch=10))
    assert check_devices(config, 2) == []
    assert check_devices(config, 64) == [
        "global_batch: 96 is not divisible by microbatches x devices = 1 x 64 = 64; "
        "the nearest valid values are 64 and 128",
        "eval.batch: 10 is not divisible by devices = 64; the nearest valid value is 64",
    ]


def test_check_devices_knows_what_can_share_logical_shards():
    config = Config(sync=Sync(logical_shards=4))
    assert [check_devices(config, n) for n in (1, 2, 4)] == [[]] * 3
    assert check_devices(config, 3) == [
        "devices: 3 cannot share sync.logical_shards = 4; expected 1, 2 or 4"
    ]


@pytest.mark.parametrize("seed", range(50))
def test_suggested_batches_are_valid_and_nearest(seed):
    rng = random.Random(seed)
    batch, microbatches, devices = (rng.randint(1, top) for top in (500, 8, 16))
    config = Config.model_construct(**dict(Config(global_batch=batch, microbatches=microbatches)))
    lines = check_devices(config, devices)
    valid = [b for b in range(1, 1000) if b % (microbatches * devices) == 0]
    if batch in valid:
        assert lines == []
        return
    nearest = [str(b) for b in (max([b for b in valid if b < batch], default=0),
                                min(b for b in valid if b > batch)) if b]  # fmt: skip
    assert lines[0].endswith(" and ".join(nearest))

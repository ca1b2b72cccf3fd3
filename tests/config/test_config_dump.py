"""Configurations to YAML and back, and their differences."""

import random
from contextlib import suppress
from typing import Any

import pytest

from jaxdp.config import Config, diff, flatten, load_config, to_yaml
from jaxdp.config.keys import KEYS, SECTIONS, TEXT_KEYS, fields_of_kinds, section_of
from jaxdp.config.kinds import Cnn, Lion, Npz
from jaxdp.errors import UserError

TEXTS = ["2024", "null", "~", "true", "3e-4", " a", "a: b # c", "'", '"\\', "ü €", "a\nb\t", "[x]",
         "x " * 80, "- a", "&a", "!b", "2024-01-01", "\U0001f600", "\x85\u2028\x7f", "=", "<<",
         "a\r\nb", "%x", "@", "yes", "\ufeff", "...", "---"]  # fmt: skip


def test_text_of_a_file():
    assert (
        to_yaml(Config(model=Cnn(channels=(8, 16)), optimizer=Lion()))
        == """\
steps: 1000
seed: 0
devices: auto
global_batch: 96
microbatches: 1
compute_dtype: float32
out: null
resume: false
init_from: null
model:
  kind: cnn
  channels: [8, 16]
  hidden: 128
  dropout: 0.0
data:
  kind: digits
optimizer:
  kind: lion
  learning_rate: 0.0001
  schedule: constant
  warmup_steps: 0
  end_fraction: 0.0
  clip_norm: null
  freeze: []
  weight_decay: 0.0
  b1: 0.9
  b2: 0.99
sync:
  algorithm: psum
  tune: file
  tune_file: null
  bucket_bytes: null
  first_bucket_bytes: null
  peel_last: null
  wire: float32
  shard_optimizer: false
  compression: null
  top_k_fraction: 0.01
  power_sgd_rank: 4
  local_steps: null
  outer_learning_rate: 1.0
  outer_momentum: 0.0
  logical_shards: null
checkpoint:
  every: 0
  keep: 3
  keep_best: null
  keep_every: null
  mean_time_to_failure: 24.0
  verify: fast
eval:
  every: 0
  batch: null
log:
  every: 10
  progress: auto
  tensorboard: false
guard:
  every: 100
  divergence: stop
  nonfinite: stop
  limit: 5
"""
    )


def reload(config: Config, tmp_path) -> Config:
    file = tmp_path / "x.yaml"
    file.write_bytes(to_yaml(config).encode())
    return load_config(str(file))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_survive(text, tmp_path):
    config = Config(out=text, data=Npz(path=text))
    assert reload(config, tmp_path) == config


@pytest.mark.parametrize("number", [1e22, 1e16, 5e-324, 0.1 + 0.2, 7, 1.7976931348623157e308])
def test_numbers_survive(number, tmp_path):
    config = Config(optimizer=Lion(weight_decay=number))
    assert reload(config, tmp_path) == config


def _random_value(rng: random.Random, path: str, default: Any) -> Any:
    if path in TEXT_KEYS:
        return "".join(rng.choice("aZ09 .:#'\"\\-[]{}\n~éü,&*!|>%@`") for _ in range(9)) + "x"
    if default is None:
        return rng.choice([None, 2, 4])
    if isinstance(default, bool):
        return rng.random() < 0.5
    if isinstance(default, int):
        return rng.choice([1, 2, 4, 8])
    if isinstance(default, float):
        return rng.choice([10.0**-k for k in range(1, 18)] + [rng.random() * 0.99 + 1e-9])
    if isinstance(default, tuple):
        return [rng.randint(1, 2000) for _ in range(rng.randint(1, 30))]
    return default


def _random_config(rng: random.Random) -> Config:
    """A valid configuration; the many that break a rule are thrown away."""
    for _ in range(1000):
        kinds = {name: rng.choice(list(models)) for name, models in SECTIONS.items()}
        share = rng.random()  # of keys that are given: the more, the more rules are broken
        overrides = [(f"{name}.kind", kind) for name, kind in kinds.items() if kind]
        for path, field in fields_of_kinds(kinds).items():
            if not path.endswith(".kind") and (field.is_required() or rng.random() < share):
                overrides.append((path, _random_value(rng, path, field.default)))
        with suppress(UserError):
            return load_config(None, overrides)
    pytest.fail("no valid configuration was found")


@pytest.mark.parametrize("seed", range(25))
def test_random_round_trips(seed, tmp_path):
    config = _random_config(random.Random(seed))
    again = reload(config, tmp_path)
    assert again == config
    assert diff(again, config) == {}
    assert to_yaml(again) == to_yaml(config)


def test_all_keys_are_written_in_order():
    sections = [section_of(path) for path in flatten(Config())]
    assert sections == sorted(sections, key=["", *SECTIONS].index)
    assert set(flatten(Config())) <= set(KEYS)


def test_diff():
    a = Config(steps=5)
    b = Config(model=Cnn(hidden=3), steps=6)
    assert diff(a, a) == {}
    assert diff(a, b) == {
        "steps": (5, 6),
        "model.kind": ("mlp", "cnn"),
        "model.hidden": ((512, 512), 3),
        "model.channels": (None, (32, 64)),
    }

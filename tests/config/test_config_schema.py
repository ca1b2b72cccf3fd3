"""The schema: names, defaults, strictness, and that it says what every key means."""

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from jaxdp.config import ALGORITHMS, Config, flatten
from jaxdp.config.keys import KEYS
from jaxdp.config.kinds import Adam, Cnn, Mlp
from jaxdp.config.words import expected

# Every key of the default configuration, in the order of the schema.
DEFAULTS = {
    "steps": 1000,
    "seed": 0,
    "devices": "auto",
    "global_batch": 96,
    "microbatches": 1,
    "compute_dtype": "float32",
    "out": None,
    "resume": False,
    "init_from": None,
    "model.kind": "mlp",
    "model.hidden": (512, 512),
    "model.dropout": 0.0,
    "data.kind": "digits",
    "optimizer.kind": "adam",
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.end_fraction": 0.0,
    "optimizer.clip_norm": None,
    "optimizer.freeze": (),
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.eps": 1e-8,
    "sync.algorithm": "psum",
    "sync.tune": "file",
    "sync.tune_file": None,
    "sync.bucket_bytes": None,
    "sync.first_bucket_bytes": None,
    "sync.peel_last": None,
    "sync.wire": "float32",
    "sync.shard_optimizer": False,
    "sync.compression": None,
    "sync.top_k_fraction": 0.01,
    "sync.power_sgd_rank": 4,
    "sync.local_steps": None,
    "sync.outer_learning_rate": 1.0,
    "sync.outer_momentum": 0.0,
    "sync.logical_shards": None,
    "checkpoint.every": 0,
    "checkpoint.keep": 3,
    "checkpoint.keep_best": None,
    "checkpoint.keep_every": None,
    "checkpoint.mean_time_to_failure": 24.0,
    "checkpoint.verify": "fast",
    "eval.every": 0,
    "eval.batch": None,
    "log.every": 10,
    "log.progress": "auto",
    "log.tensorboard": False,
    "guard.every": 100,
    "guard.divergence": "stop",
    "guard.nonfinite": "stop",
    "guard.limit": 5,
}


def test_defaults_and_order():
    assert list(flatten(Config()).items()) == list(DEFAULTS.items())


def test_algorithms_are_the_values_of_their_key():
    assert ALGORITHMS[:2] == ("psum", "ring")
    for name in ALGORITHMS:
        assert Config.model_validate({"sync": {"algorithm": name}}).sync.algorithm == name


@pytest.mark.parametrize("path", KEYS)
def test_every_key_has_a_meaning_and_a_type(path: str):
    for kind, field in KEYS[path].items():
        assert field.description, (path, kind)
        assert expected(field)


def test_frozen():
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 3
    assert hash(config) == hash(Config())


@pytest.mark.parametrize("steps", [True, 1.0, "1", None, 0])
def test_strict(steps):
    with pytest.raises(ValidationError):
        Config(steps=steps)


def test_python_callers_build_sections():
    config = Config(model=Cnn(channels=(3,)), optimizer=Adam(learning_rate=1), steps=3)
    assert config.optimizer.learning_rate == 1.0
    assert config.model != Mlp()


def test_importing_imports_no_jax():
    code = (
        "import sys, jaxdp.config; "
        "print(*(name for name in ('jax', 'numpy', 'flax', 'optax') if name in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == ""

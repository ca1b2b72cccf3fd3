"""The reproducible step: the same bits for every number of devices, and the training of one."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import (
    LossOut,
    all_reduce_sync,
    hlo,
    load_config,
    make_reproducible_step,
    make_train_step,
    run_training,
)
from jaxdp.assemble import load_data
from jaxdp.checking import equality, execution, subject_of
from jaxdp.errors import UserError
from jaxdp.freeze import freeze
from jaxdp.losses import language_loss
from jaxdp.models import build_model
from jaxdp.models.batch_norm import sum_over_devices
from jaxdp.plan import as_planned
from jaxdp.report.progress import SilentReporter
from jaxdp.steps.reproducible import pack, tree_sum, unpack
from jaxdp.steps.shards import by_turns
from jaxdp.trees import digest

SHARDS, BATCH, WIDTH, CLASSES = 8, 64, 13, 5


def net_loss(params, model_state, batch, keys):
    """A network with weights per example, dropout, and a statistic of the examples it sees."""
    hidden = jnp.tanh(batch["x"] @ params["a"])
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, hidden.shape[1:]))(keys)
    logits = jnp.where(kept, hidden / 0.8, 0) @ params["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    weight = batch["weight"].sum()
    seen = 0.9 * model_state["seen"] + 0.1 * batch["x"].mean(0)
    accuracy = ((logits.argmax(-1) == batch["y"]) * batch["weight"]).sum(), weight
    return LossOut((losses * batch["weight"]).sum(), weight, {"accuracy": accuracy}, {"seen": seen})


def net_params(rng, dtype=np.float32):
    shapes = {"a": (WIDTH, 17), "b": (17, CLASSES)}
    params = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return params, {"seen": np.zeros(WIDTH, dtype)}


def net_batch(rng, dtype=np.float32):
    """Unequal weights, many of them 0: whole shards may be masked."""
    weight = rng.integers(0, 4, BATCH) * (rng.random(BATCH) < 0.5)
    return {
        "x": rng.normal(size=(BATCH, WIDTH)).astype(dtype),
        "y": rng.integers(0, CLASSES, BATCH).astype(np.int32),
        "weight": weight.astype(dtype),
    }


def hostile_batches(rng):
    """Four good batches; between them one without weight and one that is not finite."""
    batches = [net_batch(rng) for _ in range(6)]
    batches[2]["weight"][:] = 0
    batches[3]["x"][-1, 0] = np.nan
    return batches


def train(step, batches, params, model_state):
    state = step.init(params, model_state)
    for batch in batches:
        state, metrics = step(state, step.place(batch))
    return state, {name: float(value) for name, value in metrics.items()}


def test_the_same_bits_for_every_number_of_devices(mesh_of, rng, few):
    batches, start = hostile_batches(rng), net_params(rng)
    options = {"microbatches": 2, "clip_norm": 0.5}
    found = []
    for n in (1, *few([2, 4, 8], 1)):  # every device compiles for itself
        step = make_reproducible_step(
            net_loss, optax.adamw(0.01), mesh_of(n), logical_shards=SHARDS, **options
        )
        state, metrics = train(step, batches, *start)
        assert (int(state.skipped), int(state.nonfinite)) == (1, 1)
        found.append((digest(state), metrics))
    assert all(other == found[0] for other in found[1:])
    # the test can tell: an all-reduce by the number of devices gives other bits
    fast = set()
    for n in (1, 8):
        step = make_train_step(
            net_loss, optax.adamw(0.01), all_reduce_sync("ring"), mesh_of(n), **options
        )
        fast.add(digest(train(step, batches, *start)[0].params))
    assert len(fast) > 1


def test_the_same_bits_of_an_attention_network(mesh_of, rng, few):
    # its backward is what one fused program compiles otherwise for one device
    model = build_model(
        "gpt", shape=(16,), num_classes=32, layers=1, width=16, heads=2, positions="rotary",
        dropout=0.0,
    )  # fmt: skip
    start = jax.device_get(model.init(jax.random.key(int(rng.integers(99)))))
    batches = [{"tokens": rng.integers(0, 32, (8, 17)).astype(np.int32)} for _ in range(4)]
    found = set()
    for n in (1, *few([2, 4], 1)):
        step = make_reproducible_step(
            language_loss(model, "bits"), optax.adamw(0.01), mesh_of(n), logical_shards=4
        )
        found.add(digest(train(step, batches, *start)[0]))
    assert len(found) == 1


def test_law_1_in_x64(mesh_of, rng):
    def loss(params, model_state, batch, keys):  # a statistic would be of a shard, or of a device
        return net_loss(params, model_state, batch, keys)._replace(model_state=model_state)

    with jax.enable_x64(True):
        batches, start = (
            [net_batch(rng, np.float64) for _ in range(10)],
            net_params(rng, np.float64),
        )
        options = {"microbatches": 2, "clip_norm": 0.5}
        plain = make_train_step(loss, optax.sgd(0.1), all_reduce_sync(), mesh_of(1), **options)
        one, _ = train(plain, batches, *start)
        step = make_reproducible_step(
            loss, optax.sgd(0.1), mesh_of(2), logical_shards=SHARDS, **options
        )
        two, _ = train(step, batches, *start)
        for name, p in one.params.items():
            p, q = np.asarray(p), np.asarray(two.params[name])
            assert q.dtype == np.float64
            assert np.linalg.norm(p - q) / np.linalg.norm(p - start[0][name]) <= 1e-12


class Lines(SilentReporter):
    """Keeps what it is told."""

    def __init__(self):
        self.lines = []

    def line(self, text):
        self.lines.append(text)


KEYS = {
    "sync.logical_shards": 4, "steps": 9, "model.hidden": (8,), "model.dropout": 0.2,
    "optimizer.kind": "adamw", "optimizer.clip_norm": 0.5, "log.every": 3,
}  # fmt: skip


def run(out, *, should_stop=lambda: False, reporter=None, **keys):
    given = KEYS | {"out": str(out)} | keys
    return run_training(load_config(None, list(given.items())), reporter, should_stop)


def test_the_devices_may_change_at_a_resume_and_between_processes(tmp_path):
    reporter = Lines()
    for devices, stop in ((2, 3), (1, 6), (2, None)):
        stops = iter([False] * (3 if stop else 99) + [True])
        changed = run(
            tmp_path / "a",
            devices=devices,
            resume=stop != 3,
            reporter=reporter,
            should_stop=lambda stops=stops: next(stops),
        )
        assert changed["steps"] == (stop or KEYS["steps"])
    assert any("4 logical shards, the same bits for 1, 2, 4 devices" in x for x in reporter.lines)
    # a process of its own with two devices, where this one has nine
    given = [f"--{k}={list(v) if isinstance(v, tuple) else v}" for k, v in KEYS.items()]
    given += ["--devices=2", f"--out={tmp_path / 'b'}", "--log.progress=none"]
    subprocess.run([sys.executable, "-m", "jaxdp.train", *given], check=True)
    straight = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert straight["params_digest"] == changed["params_digest"]
    assert straight["algorithm"] == "recursive_doubling"


def test_a_check_passes_and_finds_the_same_bits(tmp_path):
    given = KEYS | {"devices": 2, "sync.logical_shards": 2}
    config = load_config(None, list(given.items()))
    devices = jax.devices()[:2]
    subject = subject_of(config, load_data(config), devices)
    for line in (equality.gradients(subject, devices), equality.optimizer(subject, devices)):
        assert line.verdict == "pass"
        assert "deviation 0.0e+00" in line.detail
    lines = list(execution.asked_of_a_run(subject, devices))
    assert [line for line in lines if line.verdict != "pass"] == []


def test_three_programs_of_which_one_communicates_as_planned(mesh_of, rng):
    step = make_reproducible_step(
        net_loss, optax.sgd(0.1), mesh_of(4), logical_shards=SHARDS, frozen=freeze(["b"])
    )
    start = net_params(rng)
    state, batch = step.init(*start), step.place(net_batch(rng))
    compiled = step.run.lower(state, batch).compile()
    by_hand, _ = step(step.init(*start), batch)
    after, _ = compiled(state, batch)
    assert digest(after) == digest(by_hand)
    assert state.params["a"].is_deleted()
    assert (jax.device_get(after.params["b"]) == start[0]["b"]).all()  # the frozen leaf
    assert (jax.device_get(after.params["a"]) != start[0]["a"]).any()
    assert compiled.as_text().count("HloModule") == 3
    found = hlo.collectives(compiled.as_text())
    assert len(found) == 2
    assert as_planned(step.plan(*compiled.args_info[0]), found)


def test_shard_s_holds_the_same_examples_for_every_number_of_devices(rng):
    x = rng.integers(0, 1000, (3, 16, 2))
    for n in (1, 2, 4, 8):
        seen = []
        for turn in by_turns({"x": x}, 8, n):
            for device, s in enumerate(turn.number):
                assert s // (8 // n) == device
                np.testing.assert_array_equal(turn.examples["x"][device], x[:, 2 * s : 2 * s + 2])
                seen.append(int(s))
        assert sorted(seen) == list(range(8))


def test_the_tree_adds_neighbours_first(rng):
    a, b, c, d = rng.normal(size=(4, 1000)).astype(np.float32)
    found = np.asarray(jax.jit(tree_sum)([a, b, c, d]))
    np.testing.assert_array_equal(found, (a + b) + (c + d))
    assert (found != ((a + b) + c) + d).any()


def test_what_is_packed_is_unpacked(rng):
    tree = {"a": rng.normal(size=(2, 3)), "b": [np.float32(rng.normal()), rng.normal(size=0)]}
    with jax.enable_x64(True):
        tree = jax.tree.map(jnp.asarray, tree)
        packed = pack(tree)
        assert [v.dtype for v in packed.vectors] == [np.float32, np.float64]
        jax.tree.map(np.testing.assert_array_equal, unpack(packed), tree)


def test_mistakes(mesh_of, rng):
    def make(n=2, shards=4, loss=net_loss):
        return make_reproducible_step(loss, optax.sgd(0.1), mesh_of(n), logical_shards=shards)

    with pytest.raises(UserError, match="logical_shards: 6; expected a power of two"):
        make(shards=6)
    for n in (3, 8):
        with pytest.raises(UserError, match=f"4 on {n} devices; expected one of 1, 2, 4 devices"):
            make(n)
    with pytest.raises(UserError, match=r"divisible by 4 \(1 parts x 4 logical shards\)"):
        make().place({"x": np.ones(6)})

    def statistics(params, model_state, batch, keys):
        return sum_over_devices((params["w"] * batch["g"]).sum()), jnp.float32(1)

    def psum(params, model_state, batch, keys):
        return jax.lax.psum((params["w"] * batch["g"]).sum(), "data"), jnp.float32(1)

    for loss in (statistics, psum):
        step = make(loss=loss)
        with pytest.raises(UserError, match=r"calls the collective psum.*expected none"):
            train(step, [{"g": np.ones(4, np.float32)}], {"w": np.float32(5)}, None)

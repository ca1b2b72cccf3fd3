"""Every line of a check passes on a right training, and fails on the mistake it is about."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import GradSync, LossOut, all_reduce_sync, choosing, load_config, make_train_step
from jaxdp.assemble import load_data
from jaxdp.checking import (
    Subject,
    equality,
    execution,
    precision,
    randomness,
    run_check,
    stream,
    subject_of,
)
from jaxdp.checking.execution import reductions, run_steps, temporary_folder
from jaxdp.collectives.tuning import Choice

WIDTH, BATCH, CLASSES = 6, 16, 3
LINES = ("gradients", "weights", "optimizer", "precision", "randomness", "data stream")
LINES += ("replicas", "reductions", "resume", "compilation", "donation")


class Stream:
    """Random examples, a function of the step."""

    def __init__(self, seed):
        self.seed = seed

    def batch(self, step):
        rng = np.random.default_rng([self.seed, step])
        x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        return {"x": x, "y": rng.integers(0, CLASSES, BATCH).astype(np.int32)}


def drop(h, keys):
    if keys is None:
        return h
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, h.shape[1:]))(keys)
    return jnp.where(keep, h / 0.7, 0)


def losses_of(params, batch, keys, dropout=drop):
    h = dropout(jnp.tanh(batch["x"].astype(params["a"].dtype) @ params["a"]), keys)
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["b"], batch["y"])


def right(params, model_state, batch, keys):
    losses = losses_of(params, batch, keys)
    weight = batch["weight"].astype(losses.dtype)
    return LossOut((losses * weight).sum(), weight.sum())


def subject(rng, loss=right, sync=None, microbatches=2, stream=None, dtype=None, **changes):
    options = {
        "compute_dtype": dtype,
        "loss_fn": loss,
        "optimizer": optax.adam(0.01),
        "sync": sync or all_reduce_sync("ring"),
        "microbatches": microbatches,
    }
    a = rng.normal(size=(WIDTH, 5)).astype(np.float32)
    b = rng.normal(size=(5, CLASSES)).astype(np.float32)
    return Subject(
        loss_fn=loss,
        make_step=functools.partial(make_train_step, **options),
        init=lambda: ({"a": a, "b": b}, {}),
        batches=stream or Stream(int(rng.integers(99))),
        size=BATCH,
        compute_dtype=dtype,
        **changes,
    )


QUESTIONS = {
    "gradients": equality.gradients,
    "weights": functools.partial(equality.weights, equal_is_right=True),
    "optimizer": equality.optimizer,
    "precision": functools.partial(precision.precision, exact_is_right=True),
    "randomness": randomness.randomness,
    "data stream": lambda subject, devices: stream.stream(subject),
    "run": execution.asked_of_a_run,
}


def asked(subject, *questions, n=4):
    """name -> line, of these questions alone: what a test costs is the programs they compile."""
    subject = dataclasses.replace(subject, make_step=functools.cache(subject.make_step))
    lines = []
    for name in questions:
        found = QUESTIONS[name](subject, jax.devices()[:n])
        lines += list(found) if name == "run" else [found]
    return {line.name: line for line in lines}


def failed(subject, *questions, n=4):
    """name -> detail of the lines that fail, of these questions."""
    lines = asked(subject, *questions, n=n)
    return {name: line.detail for name, line in lines.items() if line.verdict == "fail"}


@pytest.mark.parametrize(("n", "microbatches"), [(2, 1), (4, 2)])
def test_a_right_training_passes(n, microbatches, rng):
    lines = run_check(subject(rng, microbatches=microbatches), jax.devices()[:n])
    assert tuple(line.name for line in lines) == LINES
    assert [line for line in lines if line.verdict == "fail"] == []


def test_a_mean_of_means(rng):
    def loss(params, model_state, batch, keys):
        out = right(params, model_state, batch, keys)
        return LossOut(out.sum / jnp.maximum(out.weight, 1), jnp.ones_like(out.sum))

    found = failed(subject(rng, loss), "gradients", "weights")
    assert "gradients" not in found
    assert "a mean of means" in found["weights"]


def test_a_loss_that_is_never_finite(rng):
    def loss(params, model_state, batch, keys):
        out = right(params, model_state, batch, keys)
        return out._replace(sum=out.sum * jnp.nan)

    found = failed(subject(rng, loss), "gradients", "precision", "run", n=2)
    assert "no parameter changed" in found["gradients"]
    assert "no parameter changed" in found["precision"]
    assert "none of 4 steps changed a parameter" in found["replicas"]


def test_two_examples_are_enough_to_find_a_mean_of_means(rng):
    one = dataclasses.replace(subject(rng, microbatches=1), size=2)
    assert (one.weighted(0)["weight"] == [1, 0]).all()
    assert failed(one, "gradients", "weights", n=2) == {}


def test_signed_zeros_differ():
    from jaxdp.checking.execution import _differs

    text = _differs("params/w", 1, np.float32([1, 0.0]), np.float32([1, -0.0]))
    assert "params/w[1] is 0.0 on device 0 and -0.0 on device 1" in text


def test_a_forgotten_reduction(rng):
    sync = GradSync(lambda tree: (), lambda tree, state, axis: (tree, state))
    found = failed(subject(rng, sync=sync), "gradients", "run")
    assert "params/a" in found["replicas"]
    assert "device 0" in found["replicas"]
    assert "nothing is reduced" in found["reductions"]
    assert "gradients" in found


def test_a_reduction_of_some_leaves_only(rng):
    def update(tree, state, axis):
        whole = jax.lax.psum(tree, axis)
        whole["grads"]["b"] = tree["grads"]["b"]
        return whole, state

    sync = GradSync(lambda tree: (), update)
    found = failed(subject(rng, sync=sync), "gradients", "run")
    assert "params/b" in found["gradients"]
    assert "params/b" in found["replicas"]


def test_a_sum_taken_for_a_mean(rng):
    def update(tree, state, axis):
        whole = jax.lax.psum(tree, axis)
        n = jax.lax.axis_size(axis)
        return whole | {"grads": jax.tree.map(lambda g: g * n, whole["grads"])}, state

    found = failed(subject(rng, sync=GradSync(lambda tree: (), update)), "gradients")
    assert "a sum over the 4 devices where their mean is wanted" in found["gradients"]


def test_rounding_on_the_wire_is_a_choice_and_no_fault(rng):
    sync, exact = all_reduce_sync("ring", wire="bfloat16"), all_reduce_sync("ring")
    one = subject(rng, sync=sync, exact_sync=exact)
    lines = asked(one, "gradients", "optimizer", "precision", "run", n=2)
    assert all(line.verdict == "pass" for line in lines.values()), lines
    assert "by choice makes it" in lines["gradients"].detail
    nobody_said_so = subject(rng, sync=sync)
    assert "gradients" in failed(nobody_said_so, "gradients", n=2)


def in_float32(params, model_state, batch, keys):
    """Computes in float32 whatever it is given."""
    return right(jax.tree.map(jnp.float32, params), model_state, batch, keys)


def slightly_wrong(n_wrong):
    """The gradients are 0.003 % too large on `n_wrong` devices."""

    def update(tree, state, axis):
        whole = jax.lax.psum(tree, axis)
        wrong = jax.lax.axis_size(axis) == n_wrong
        grads = jax.tree.map(lambda g: g * (1 + 3e-5 * wrong), whole["grads"])
        return whole | {"grads": grads}, state

    return GradSync(lambda tree: (), update)


def test_a_loss_in_float32_is_allowed_what_its_rounding_explains(rng):
    questions = ("gradients", "weights", "precision")
    lines = asked(subject(rng, in_float32), *questions, "optimizer", n=2)
    assert all(line.verdict == "pass" for line in lines.values()), lines
    assert "its loss computes in float32, where" in lines["gradients"].detail
    found = failed(subject(rng, in_float32, sync=slightly_wrong(2)), *questions, n=2)
    assert set(found) == set(questions)


def rounds_on(n, size):
    """Gradients moved, on n devices, by rounding of `size` of their root mean square."""

    def update(tree, state, axis):
        whole = jax.lax.psum(tree, axis)
        off = size * (jax.lax.axis_size(axis) == n)
        grads = jax.tree.map(
            lambda g: g + off * jnp.sqrt(jnp.mean(g * g)) * (-1) ** jnp.arange(g.shape[-1])[None],
            whole["grads"],
        )
        return whole | {"grads": grads}, state

    return GradSync(lambda tree: (), update)


def a_row_off(by, n):
    """An optimizer whose step of params/a[1] is too large on n devices."""

    def update(updates, params):
        factor = 1 + by * (jax.lax.axis_size("data") == n)
        return updates | {"a": updates["a"].at[1].multiply(factor)}

    return optax.chain(optax.adam(0.01), optax.stateless(update))


@pytest.mark.parametrize("by", [0, 1e-3])
def test_an_optimizer_is_allowed_what_it_makes_of_rounding(by, rng):
    """Adam makes a full step of a gradient that is nothing but rounding, and of no other."""

    class NearZero(Stream):
        def batch(self, step):
            batch = super().batch(step)
            return batch | {"x": batch["x"] * np.float32([1e-7] + [1] * (WIDTH - 1))}

    one = subject(rng, in_float32, sync=rounds_on(2, 5e-7), stream=NearZero(int(rng.integers(99))))
    make_step = functools.partial(one.make_step, optimizer=a_row_off(by, 2))
    line = equality.optimizer(dataclasses.replace(one, make_step=make_step), jax.devices()[:2])
    assert line.verdict == ("fail" if by else "pass"), line.detail
    assert ("params/a is off by" if by else "of a gradient moved by 7.6e-06") in line.detail


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_as_the_training_computes_in(dtype, rng):
    def loud(params, model_state, batch, keys):  # float16's first scale is too high for it
        out = right(params, model_state, batch, keys)
        return out._replace(sum=out.sum * 100)

    lines = asked(subject(rng, loud, dtype=dtype), "gradients", "precision", "run", n=2)
    assert all(line.verdict == "pass" for line in lines.values()), lines
    assert f"in {jnp.dtype(dtype)}: largest deviation" in lines["precision"].detail
    # float16: a step may overflow until the scale has come down
    assert re.search("after [1-4] updates", lines["replicas"].detail)


def test_a_reduction_that_rounds_what_is_not_float64(rng):
    def update(tree, state, axis):
        def summed(x):
            narrow = x if x.dtype == jnp.float64 else x.astype(jnp.bfloat16)
            return jax.lax.psum(narrow, axis).astype(x.dtype)

        whole = jax.lax.psum(tree, axis)
        return whole | {"grads": jax.tree.map(summed, tree["grads"])}, state

    sync = GradSync(lambda tree: (), update)
    found = failed(subject(rng, sync=sync), "gradients", "precision", "run", n=2)
    assert found.keys() == {"precision"}
    assert "a reduction that rounds or overflows" in found["precision"]


def test_a_small_leaf_that_is_not_reduced_is_missed_in_the_bytes(rng):
    """Less than 1 % of the bytes; that of a gradient which equals another may be missing."""
    params = {"a": (WIDTH, 200), "b": (200, CLASSES), "c": (CLASSES,), "d": (CLASSES,)}
    params = {name: rng.normal(size=size).astype(np.float32) for name, size in params.items()}

    def loss(params, model_state, batch, keys):
        h = jnp.tanh(batch["x"].astype(params["a"].dtype) @ params["a"])
        logits = h @ params["b"] + (params["c"] + params["d"])[None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.sum(), jnp.asarray(len(losses), losses.dtype)

    def all_but(*left_out):
        def update(tree, state, axis):
            whole = jax.lax.psum(tree, axis)
            return whole | {
                "grads": whole["grads"] | {x: tree["grads"][x] for x in left_out}
            }, state

        return all_reduce_sync()._replace(update=update)

    for left_out, is_fault in (((), False), (("c", "d"), True)):
        one = subject(rng, loss, sync=all_but(*left_out), microbatches=1)
        one = dataclasses.replace(one, init=lambda: (params, {}))
        with temporary_folder() as folder:
            run = run_steps(one, jax.devices()[:2], Path(folder) / "checkpoints")
            line = reductions(run, one)
        assert line.verdict == ("fail" if is_fault else "pass"), line.detail


def test_batch_statistics_kept_local():
    found = {}
    for mode in ("sync", "local"):
        given = [("model.batch_norm", mode), ("model.channels", [4])]
        config = load_config("configs/digits_resnet.yaml", given)
        one = subject_of(config, load_data(config), jax.devices()[:2])
        found[mode] = failed(one, "gradients", n=2)
    assert found["sync"] == {}
    assert "model.batch_norm local" in found["local"]["gradients"]


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_auto_is_checked_as_what_it_comes_to(wire, monkeypatch):
    asked = []

    def choose(nbytes, n, tune_file):
        asked.append((nbytes, n, tune_file))
        return Choice("ring", "fastest")

    monkeypatch.setattr(choosing, "choose", choose)
    given = {"sync.algorithm": "auto", "sync.tune_file": "t.json", "sync.bucket_bytes": 300}
    given |= {"sync.wire": wire, "model.hidden": [4]}
    config = load_config("configs/digits_mlp.yaml", list(given.items()))
    data, devices = load_data(config), jax.devices()[:2]
    one, ring = subject_of(config, data, devices), subject_of(config, data, devices, "ring")
    assert asked == [(300, 2, "t.json")]
    sums = {"grads": jax.ShapeDtypeStruct((100,), np.float32), "model_state": {}, "scalars": {}}
    assert one.make_step.keywords["sync"].plan(sums, 2) == (
        ring.make_step.keywords["sync"].plan(sums, 2)
    )
    assert (one.exact_sync is None) == (wire == "float32")
    if one.exact_sync is not None:
        assert one.exact_sync.plan(sums, 2) == ring.exact_sync.plan(sums, 2)


def test_random_numbers_without_the_examples_keys(rng):
    def constant(h, keys):
        return (
            h
            if keys is None
            else jnp.where(jax.random.bernoulli(jax.random.key(0), 0.7, h.shape), h, 0)
        )

    def first_key(h, keys):
        return h if keys is None else jnp.where(jax.random.bernoulli(keys[0], 0.7, h.shape), h, 0)

    for dropout, words in (
        (constant, "a key of its own"),
        (first_key, "one mask for the whole batch"),
    ):

        def loss(params, model_state, batch, keys, dropout=dropout):
            losses = losses_of(params, batch, keys, dropout)
            return LossOut((losses * batch["weight"]).sum(), batch["weight"].sum())

        assert words in failed(subject(rng, loss), "randomness")["randomness"]


def test_a_reduction_inside_the_loop(rng):
    # a batch so that the gradient is in the loop over microbatches: the sum goes through psum there
    @jax.custom_vjp
    def reduced(x):
        return x

    reduced.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.pmean(g, "data"),))

    def loss(params, model_state, batch, keys):
        return right(jax.tree.map(reduced, params), model_state, batch, keys)

    found = failed(subject(rng, loss), "gradients", "run")
    assert "inside the loop over microbatches" in found["reductions"]
    assert "gradients" not in found  # the numbers are right: only this line can tell


def test_gradients_that_travel_twice(rng):
    def update(tree, state, axis):
        whole = jax.lax.psum(tree, axis)
        mean = jax.tree.map(lambda g: g / jax.lax.axis_size(axis), whole["grads"])
        return whole | {"grads": jax.lax.psum(jax.lax.optimization_barrier(mean), axis)}, state

    sync = all_reduce_sync()._replace(update=update)
    assert set(failed(subject(rng, sync=sync), "gradients", "run")) == {"reductions"}


def test_another_algorithm_than_planned(rng):
    sync = all_reduce_sync("ring")._replace(update=all_reduce_sync("tree").update)
    found = failed(subject(rng, sync=sync), "gradients", "run")
    assert set(found) == {"reductions"}
    assert "planned as 6 collective-permutes" in found["reductions"]


def test_a_stream_that_remembers(rng):
    class Remembers(Stream):
        calls = 0

        def batch(self, step):
            self.calls += 1
            return super().batch(step + 100 * self.calls)

    found = failed(subject(rng, stream=Remembers(1)), "data stream", "run")
    assert "gave other examples when asked again" in found["data stream"]
    assert "differs by up to" in found["resume"]


def test_a_batch_of_another_size(rng):
    class Ragged(Stream):
        def batch(self, step):
            size = BATCH if step % 2 == 0 else BATCH // 2
            return {name: x[:size] for name, x in super().batch(step).items()}

    class Cut(Subject):
        def batch(self, step):
            batch = self.batches.batch(step)
            return {"weight": np.ones(len(batch["x"]), np.float32), **batch}

        def weighted(self, step):
            return self.batch(step)

    one = subject(rng, stream=Ragged(2))
    cut = Cut(**{f.name: getattr(one, f.name) for f in dataclasses.fields(one)})
    found = failed(cut, "data stream", "run")
    assert "2 different shapes" in found["data stream"]
    assert "2 programs" in found["compilation"]


def test_a_state_outside_of_the_checkpoint(rng):
    one = subject(rng)

    def make_step(**options):
        step, calls = one.make_step(**options), [0]

        def run(state, batch):
            calls[0] += 1
            x = np.asarray(batch["x"]) * np.float32(calls[0])
            return step.run(state, dict(batch) | {"x": jax.device_put(x, batch["x"].sharding)})

        run.lower = step.run.lower
        return dataclasses.replace(step, run=run)

    found = failed(dataclasses.replace(one, make_step=make_step), "run")
    assert "not in the checkpoint" in found["resume"]


def test_a_state_that_is_not_donated(rng):
    one = subject(rng)

    def make_step(**options):
        step = one.make_step(**options)
        run = jax.jit(step.run.__wrapped__)
        return dataclasses.replace(step, run=run)

    found = failed(dataclasses.replace(one, make_step=make_step), "run")
    assert set(found) == {"donation"}
    assert "twice the memory" in found["donation"]


def test_a_loss_without_weights_or_randomness(rng):
    def loss(params, model_state, batch, keys):
        losses = losses_of(params, batch, None)
        return LossOut(losses.sum(), jnp.asarray(len(losses), losses.dtype))

    lines = asked(subject(rng, loss), "gradients", "weights", "randomness", "run", n=2)
    assert lines["weights"].verdict == lines["randomness"].verdict == "n/a"
    assert all(line.verdict != "fail" for line in lines.values())

"""Evaluation: the same numbers on any number of devices."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import LossOut, evaluate, make_eval_step
from jaxdp.data import eval_batches
from jaxdp.errors import UserError


def loss(params, model_state, batch, keys):
    assert keys is None
    logits = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    weight = batch["weight"]
    correct = (logits.argmax(-1) == batch["label"]) * weight
    total = weight.sum()
    return LossOut((losses * weight).sum(), total, {"accuracy": (correct.sum(), total)})


class Examples:
    """Random examples as a source."""

    def __init__(self, rng, n):
        self.x = rng.normal(size=(n, 64)).astype(np.float32)
        self.label = rng.integers(0, 10, n).astype(np.int32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, indices):
        return {"x": self.x[indices], "label": self.label[indices]}


@pytest.mark.parametrize("count", [21, 103])
def test_d3_counts_are_exact_and_losses_equal(count, mesh_of, rng):
    params = {
        "a": rng.normal(size=(64, 33)).astype(np.float32),
        "b": rng.normal(size=(33, 10)).astype(np.float32),
    }
    source = Examples(rng, count)
    found = [
        evaluate(make_eval_step(loss, mesh_of(n)), params, (), eval_batches(source, 48))
        for n in (1, 2, 4, 8)
    ]
    logits = np.tanh(source.x.astype(np.float64) @ params["a"]) @ params["b"].astype(np.float64)
    assert found[0]["weight"] == count
    assert found[0]["accuracy"] * count == pytest.approx((logits.argmax(1) == source.label).sum())
    log_z = np.log(np.exp(logits).sum(1))
    assert found[0]["loss"] == pytest.approx(
        (log_z - logits[np.arange(count), source.label]).mean(), rel=1e-5
    )
    for other in found[1:]:
        assert other == found[0]


def test_a_batch_that_does_not_divide_is_refused(mesh_of, rng):
    step = make_eval_step(loss, mesh_of(5))
    with pytest.raises(UserError, match="48 examples on 5 devices; expected a multiple of 5"):
        evaluate(step, {}, (), eval_batches(Examples(rng, 21), 48))

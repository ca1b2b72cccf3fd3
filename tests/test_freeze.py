"""Frozen leaves: untouched, without gradient, state or traffic."""

import jax
import numpy as np
import optax
import pytest

from jaxdp import all_reduce_sync, make_train_step
from jaxdp.errors import UserError
from jaxdp.freeze import combine, freeze, nothing, partition

PARAMS = {
    "embed": {"kernel": np.ones((3, 2), np.float32)},
    "head": {"kernel": np.ones(2, np.float32), "bias": np.float32(1)},
}


def loss(params, model_state, batch, keys):
    out = batch["x"] @ params["embed"]["kernel"] @ params["head"]["kernel"] + params["head"]["bias"]
    return (out**2).sum(), out.size * out.dtype.type(1)


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [([], []), (["embed/*"], [0]), (["*kernel"], [0, 2]), (["head/bias", "embed*"], [0, 1])],
)
def test_masks(patterns, frozen):
    assert np.flatnonzero(jax.tree.leaves(freeze(patterns)(PARAMS))).tolist() == frozen


@pytest.mark.parametrize("patterns", [[], ["embed/*"], ["*kernel"]])
def test_parts_combine_to_the_whole(patterns):
    parts = partition(PARAMS, freeze(patterns)(PARAMS))
    whole = combine(*parts)
    assert jax.tree.structure(whole) == jax.tree.structure(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, whole, PARAMS)
    assert sum(len(jax.tree.leaves(part)) for part in parts) == 3


def test_a_pattern_that_matches_nothing_gets_the_nearest_names():
    with pytest.raises(UserError, match=r"'head/bais' matches no parameter.*head/bias"):
        freeze(["embed/*", "head/bais"])(PARAMS)


def test_freezing_everything_is_refused():
    with pytest.raises(UserError, match="freezes all 3 leaves"):
        freeze(["*"])(PARAMS)


def test_frozen_leaves_cost_nothing_and_stay(mesh_of, rng):
    batch = {"x": rng.normal(size=(8, 3)).astype(np.float32)}
    states, plans, norms = [], [], []
    for frozen in (nothing, freeze(["embed/*"])):
        step = make_train_step(
            loss, optax.adamw(0.1, weight_decay=1.0), all_reduce_sync(), mesh_of(4), frozen=frozen
        )
        state = step.init(PARAMS)
        plans.append(step.plan(state, step.place(batch)).sent_bytes)
        state, metrics = step(state, step.place(batch))
        states.append(state)
        norms.append(float(metrics["grad_norm"]))
    whole, part = states
    np.testing.assert_array_equal(part.params["embed"]["kernel"], PARAMS["embed"]["kernel"])
    assert not np.array_equal(whole.params["embed"]["kernel"], PARAMS["embed"]["kernel"])
    np.testing.assert_array_equal(part.params["head"]["bias"], whole.params["head"]["bias"])
    assert plans[0] - plans[1] == 2 * 3 * 6 * 4 // 4  # 2 (N - 1) / N of six float32
    # two moments for three elements and not nine, and the count
    assert sum(leaf.size for leaf in jax.tree.leaves(part.opt_state)) == 2 * 3 + 1
    mean = np.square(batch["x"].sum(1) * 2 + 1).mean()  # every kernel is 1
    assert mean == pytest.approx(float(metrics["loss"]), rel=1e-5)
    g_bias = 2 * (batch["x"].sum(1) * 2 + 1).mean()
    g_head = (2 * (batch["x"].sum(1) * 2 + 1) * batch["x"].sum(1)).mean()
    assert norms[1] == pytest.approx(np.sqrt(g_bias**2 + 2 * g_head**2), rel=1e-5)
    assert norms[0] > norms[1]

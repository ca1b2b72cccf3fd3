"""Top-k against NumPy."""

import jax
import numpy as np
import pytest

from jaxdp import top_k_sync
from jaxdp.collectives import algorithms_for
from jaxdp.config.schema import GATHER_ALGORITHMS
from jaxdp.errors import UserError


def in_numpy(vectors, k):
    """(sum, what each rank left out): one rank after another, in float32."""
    total, left = np.zeros(vectors.shape[1], np.float32), vectors.copy()
    for rank, vector in enumerate(vectors):
        places = np.argsort(-np.abs(vector), kind="stable")[:k]
        total[places] += vector[places]
        left[rank, places] = 0
    return total, left


@pytest.mark.parametrize("algorithm", ["psum", "ring"])
def test_the_largest_are_added_rank_by_rank(algorithm, synced, rng, few):
    shapes = {"a": (7, 5), "b": (3,), "c": (2, 4, 3)}
    size = 35 + 3 + 24
    for n in few([2, 3, 4, 8], 2):
        fraction = rng.uniform(0.02, 0.9)
        # shared, so that ranks send the same places; rounded to small integers: with ties
        shared = rng.normal(size=size) * 4
        vectors = np.float32(shared + rng.normal(size=(n, size)))
        if rng.random() < 0.5:
            vectors = np.round(vectors)
        parts = zip(shapes, shapes.values(), np.split(vectors, [35, 38], axis=1), strict=True)
        grads = {name: cut.reshape(n, *shape) for name, shape, cut in parts}
        update = synced(top_k_sync(fraction, algorithm=algorithm), n)
        blank = update.blank({name: np.zeros(s, np.float32) for name, s in shapes.items()})
        summed, state = update(grads, np.float32(4), blank)
        total, left = in_numpy(vectors, max(1, round(fraction * size)))
        flat = np.concatenate([leaf.reshape(-1) for leaf in summed.values()])
        np.testing.assert_array_equal(flat, total)
        owed = np.concatenate([e.reshape(n, -1) for e in state["residual"].values()], 1)
        np.testing.assert_array_equal(owed, left / 4)


def test_all_of_them_are_the_all_reduce(synced, rng):
    grads = {"w": rng.normal(size=(3, 6, 7)).astype(np.float32)}
    update = synced(top_k_sync(1), 3)
    summed, state = update(grads, np.float32(3), update.blank({"w": grads["w"][0]}))
    np.testing.assert_allclose(summed["w"], grads["w"].sum(0), atol=1e-6)
    assert not state["residual"]["w"].any()


def test_one_is_sent_at_least(synced, rng):
    grads = {"w": rng.normal(size=(2, 50)).astype(np.float32)}
    update = synced(top_k_sync(1e-9), 2)
    summed, _ = update(grads, np.float32(1), update.blank({"w": grads["w"][0]}))
    assert 1 <= np.count_nonzero(summed["w"]) <= 2


def test_what_waits_is_sent_in_the_end(synced):
    """With one place a step, three gradients of which two come once take three steps."""
    update = synced(top_k_sync(0.1), 2)
    state = update.blank({"w": np.zeros(4, np.float32)})
    steps = []
    for grad in ([3, 2, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]):
        summed, state = update({"w": np.float32([grad, grad])}, np.float32(2), state)
        steps.append(summed["w"].tolist())
    assert steps == [[6, 0, 0, 0], [0, 4, 0, 0], [0, 0, 2, 0]]


def test_mistakes_are_one_line():
    for fraction in (0, -0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match="expected above 0 and at most 1"):
            top_k_sync(fraction)
    with pytest.raises(UserError, match="tree has no all-gather, which top-k needs; expected one"):
        top_k_sync(algorithm="tree")
    many = {"w": jax.ShapeDtypeStruct((1 << 16, 1 << 15), np.float32)}
    with pytest.raises(UserError, match="2147483648 gradients; expected at most 2147483647"):
        jax.eval_shape(top_k_sync().init, many)


def test_the_configuration_knows_who_can_gather():
    # halving-doubling gathers on powers of two only: the library says so for each n
    assert {*GATHER_ALGORITHMS, "halving_doubling"} == set(algorithms_for("all_gather"))

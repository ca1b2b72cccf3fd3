"""PowerSGD against NumPy's QR and singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import power_sgd_sync
from jaxdp.errors import UserError
from jaxdp.sync.power_sgd import orthonormal


def low_rank(rng, n, shape, rank):
    """n matrices whose sum has a rank, though each of them has not."""
    noise = rng.normal(size=(n, *shape))
    noise -= noise.mean(0)
    wanted = rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))
    return np.float32(noise + wanted / n), wanted


@pytest.mark.parametrize("algorithm", ["psum", "ring"])
def test_one_step_is_the_projection_on_p(algorithm, synced, rng, few):
    for n in few([2, 3, 4, 8], 1):
        grads = {"w": rng.normal(size=(n, 4, 5, 13)).astype(np.float32)}
        update = synced(power_sgd_sync(3, algorithm=algorithm), n)
        state = update.blank({"w": grads["w"][0]})
        summed, new = update(grads, np.float32(5), state)
        each = grads["w"].reshape(n, 20, 13).astype(np.float64)
        p, _ = np.linalg.qr(each.sum(0) @ state["start"][0][0])
        np.testing.assert_allclose(summed["w"].reshape(20, 13), p @ (p.T @ each.sum(0)), atol=1e-4)
        for rank in range(n):
            left = (each[rank] - p @ (p.T @ each[rank])) / 5
            np.testing.assert_allclose(new["residual"]["w"][rank].reshape(20, 13), left, atol=1e-4)
        q = each.sum(0).T @ p
        np.testing.assert_allclose(
            np.abs(new["start"][0][0]), np.abs(q / np.linalg.norm(q, axis=0)), atol=1e-3
        )


def test_a_sum_of_the_rank_is_exact_in_one_step(synced, rng):
    grads, wanted = low_rank(rng, 3, (17, 19), 2)
    update = synced(power_sgd_sync(4), 3)  # two columns more than there are directions
    summed, state = update({"w": grads}, np.float32(1), update.blank({"w": grads[0]}))
    error = np.linalg.norm(summed["w"] - wanted) / np.linalg.norm(wanted)
    assert error <= 3e-5
    assert np.linalg.norm(state["start"][0][0], axis=0) == pytest.approx(np.ones(4), rel=1e-5)


def test_a_rank_that_does_not_pay_is_exact(synced, rng):
    grads = {
        "full": rng.normal(size=(2, 6, 7)).astype(np.float32),
        "none": rng.normal(size=(2, 9)).astype(np.float32),
        "scalar": rng.normal(size=2).astype(np.float32),
        "empty": np.zeros((2, 0, 4), np.float32),
    }
    update = synced(power_sgd_sync(6), 2)
    state = update.blank({name: g[0] for name, g in grads.items()})
    assert not jax.tree.leaves(state)
    summed, _ = update(grads, np.float32(1), state)
    for name, grad in grads.items():
        np.testing.assert_array_equal(summed[name], grad[0] + grad[1])


def test_the_warm_start_finds_the_largest_singular_values(synced, rng):
    u, _ = np.linalg.qr(rng.normal(size=(20, 20)))
    v, _ = np.linalg.qr(rng.normal(size=(15, 15)))
    values = 2.0 ** -np.arange(15)
    matrix = (u[:, :15] * values) @ v.T
    update = synced(power_sgd_sync(2), 2)
    state = blank = update.blank({"w": np.float32(matrix)})
    errors = []
    for _ in range(8):
        grads = {"w": np.float32([0.25 * matrix, 0.75 * matrix])}
        summed, new = update(grads, np.float32(1), state)
        errors.append(np.linalg.norm(summed["w"] - matrix))
        state = {**blank, "start": new["start"]}  # without the memory of errors
    best = np.linalg.norm(values[2:])
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_a_start_survives_a_gradient_of_zero(synced, rng):
    grads, wanted = low_rank(rng, 2, (12, 14), 2)
    update = synced(power_sgd_sync(2), 2)
    state = update.blank({"w": grads[0]})
    _, state = update({"w": np.zeros_like(grads)}, np.float32(1), state)
    # a rank of one leaves one column without a direction
    one = np.outer(rng.normal(size=12), rng.normal(size=14))
    _, state = update({"w": np.float32([one, one])}, np.float32(1), state)
    state["residual"]["w"] = np.zeros_like(grads)
    summed, _ = update({"w": grads}, np.float32(1), state)
    assert np.linalg.norm(summed["w"] - wanted) / np.linalg.norm(wanted) <= 1e-2


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_orthonormal_spans_the_same(scale, rng):
    p = rng.normal(size=(30, 5)) @ np.diag([1, 1e-3, 1, 10, 1])
    p[:, 2] = p[:, 0] - 2 * p[:, 1]  # no direction of its own
    basis = np.float64(orthonormal(jnp.asarray(p * scale, jnp.float32)))
    kept = np.delete(basis, 2, axis=1)
    assert not basis[:, 2].any()
    np.testing.assert_allclose(kept.T @ kept, np.eye(4), atol=1e-6)
    expected, _ = np.linalg.qr(np.delete(p, 2, axis=1))
    np.testing.assert_allclose(kept @ kept.T, expected @ expected.T, atol=1e-4)


def test_mistakes_are_one_line():
    for rank in (0, 2.0, -1):
        with pytest.raises(UserError, match=f"rank: {rank}; expected a whole number of at least 1"):
            power_sgd_sync(rank)
    with pytest.raises(UserError, match="algorithm: auto is not known; expected one of psum"):
        power_sgd_sync(algorithm="auto")

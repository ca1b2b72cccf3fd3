"""Replicas that differ by one bit: found, and named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import LossOut, all_reduce_sync, make_train_step
from jaxdp.guard import compare_replicas, describe_differences, fingerprint_numpy
from jaxdp.guard.replicas import Difference, fingerprints, odd_ones, replicated_leaves


def loss(params, model_state, batch, keys):
    out = jnp.tanh(batch["x"] @ params["a"] + params["b"][None]) ** 2
    return LossOut(out.sum(), jnp.float32(len(out)), {}, {"mean": 0.9 * model_state["mean"]})


def trained(mesh, rng, algorithm="psum", optimizer=None):
    """A state after two steps."""
    optimizer = optimizer or optax.adamw(0.1)
    step = make_train_step(loss, optimizer, all_reduce_sync(algorithm), mesh)
    params = {"a": rng.normal(size=(5, 7)).astype(np.float32), "b": np.zeros(7, np.float32)}
    state = step.init(params, {"mean": rng.normal(size=11).astype(np.float32)})
    for _ in range(2):
        batch = {"x": rng.normal(size=(mesh.size * 3, 5)).astype(np.float32)}
        state, _ = step(state, step.place(batch))
    return state


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_r2_a_flipped_bit_is_found_and_leaf_and_replica_named(n, mesh_of, rng, flip):
    mesh = mesh_of(n)
    state = trained(mesh, rng)
    assert compare_replicas(mesh, state) == []
    names = [name for name, _ in replicated_leaves(state)]
    assert {name.split("/")[0] for name in names} >= {"params", "model_state", "opt_state", "step"}
    for _ in range(20):
        name, replica = str(rng.choice(names)), int(rng.integers(n))
        leaf = dict(replicated_leaves(state))[name]
        bit = int(rng.integers(8 * leaf.nbytes))
        wrong = flip(state, name, replica, bit)
        expected = (0, 1) if n == 2 else (replica,)
        assert compare_replicas(mesh, wrong) == [Difference(name, expected)], bit


def test_hashes_are_those_of_numpy(mesh_of, rng):
    mesh = mesh_of(3)
    leaves = [leaf for _, leaf in replicated_leaves(trained(mesh, rng))]
    found = fingerprints(mesh, leaves)
    assert found.shape == (3, len(leaves), 2)
    expected = [fingerprint_numpy(np.asarray(leaf)) for leaf in leaves]
    for device in range(3):
        np.testing.assert_array_equal(found[device], expected)


def test_what_differs_by_right_is_exempt(mesh_of, rng):
    mesh = mesh_of(4)
    state = trained(mesh, rng)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    shard = jax.device_put(rng.normal(size=(4, 3)).astype(np.float32), sharding)
    exempt = state._replace(sync_state={"residual": shard}, opt_state={"moments": shard})
    names = [name for name, _ in replicated_leaves(exempt)]
    assert not [name for name in names if name.startswith(("sync_state", "opt_state"))]
    assert compare_replicas(mesh, exempt) == []


def test_nans_of_other_signs_are_equal_and_zeros_are_not(mesh_of, rng, change, flip):
    mesh = mesh_of(3)
    state = trained(mesh, rng)
    nan = change(state, "params/b", lambda leaf: leaf * np.nan)
    assert compare_replicas(mesh, flip(nan, "params/b", 1, 31)) == []
    zero = change(state, "params/b", lambda leaf: leaf * 0)
    assert compare_replicas(mesh, flip(zero, "params/b", 1, 31)) == [Difference("params/b", (1,))]


def test_one_compilation_and_no_copy_of_the_state(mesh_of, rng):
    from jaxdp.guard import replicas

    mesh = mesh_of(2)
    step = make_train_step(loss, optax.adam(0.1), all_reduce_sync(), mesh)
    state = step.init({"a": rng.normal(size=(5, 99_999)).astype(np.float32), "b": np.zeros(7)})
    replicas._fingerprints.clear_cache()
    for _ in range(2):
        compare_replicas(mesh, state)
    assert replicas._fingerprints._cache_size() == 1
    leaves = [leaf for _, leaf in replicated_leaves(state)]
    memory = replicas._fingerprints.lower(mesh, leaves).compile().memory_analysis()
    assert memory.argument_size_in_bytes > 6_000_000
    assert memory.temp_size_in_bytes < 10_000


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ([1, 2], (0, 1)),
        ([1, 1, 2], (2,)),
        ([3, 1, 2], (0, 1, 2)),
        ([1, 2, 1, 1], (1,)),
        ([1, 1, 2, 2], (0, 1, 2, 3)),
        ([1, 2, 3, 1, 1], (1, 2)),
    ],
)
def test_the_majority_is_right(values, odd):
    assert odd_ones(np.array([[v, 7] for v in values], np.uint32)) == odd


def test_words():
    found = [Difference("params/a", (2,)), Difference("opt_state/0/mu/a", (1, 2))]
    assert describe_differences(found, 5) == (
        "params/a on replica 2 of 5, opt_state/0/mu/a on replicas 1, 2 of 5"
    )
    assert describe_differences([Difference("a", (0, 1))], 2) == "a on replicas 0 and 1"
    many = [Difference(str(i), (0, 1, 2)) for i in range(7)]
    assert describe_differences(many, 3).endswith(
        "4 on all 3 replicas (no majority) and 2 leaves more"
    )

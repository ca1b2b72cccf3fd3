"""Flipping bits of one replica."""

import jax
import numpy as np
import pytest

from jaxdp.trees import named_leaves


def flipped(leaf, replica, bit):
    """`leaf` with one bit of one device's copy the other way."""
    copies = []
    for shard in leaf.addressable_shards:
        copy = np.array(shard.data)
        if shard.device == leaf.sharding.mesh.devices.flat[replica]:
            copy.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        copies.append(jax.device_put(copy, shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)


@pytest.fixture
def change():
    """(state, name of a leaf, function of the leaf) -> the state with that leaf changed."""

    def change(state, name, function):
        names = [n for n, _ in named_leaves(state)]
        leaves, structure = jax.tree.flatten(state)
        leaves[names.index(name)] = function(leaves[names.index(name)])
        return jax.tree.unflatten(structure, leaves)

    return change


@pytest.fixture
def flip(change):
    """(state, name of a leaf, replica, bit) -> the state with that bit of that replica flipped."""

    def flip(state, name, replica, bit):
        return change(state, name, lambda leaf: flipped(leaf, replica, bit))

    return flip

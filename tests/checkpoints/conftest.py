"""Checkpoints of small states, made by hand: no step is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.checkpoints import Checkpoints
from jaxdp.mesh import replicate
from jaxdp.state import TrainState


@pytest.fixture
def state_of(mesh_of, rng):
    """step -> a state of random parameters, the same numbers on n devices."""

    def make(step, n=1):
        count = np.int32(0)
        params = {"w": rng.normal(size=(5, 7)).astype(np.float32), "b": np.zeros(3, jnp.bfloat16)}
        state = TrainState(
            np.int32(step), count, count, count, params, {}, (rng.integers(0, 9, 4, np.int32),), ()
        )
        return replicate(mesh_of(n), state)

    return make


@pytest.fixture
def saved(state_of, tmp_path):
    """Three steps saved in tmp_path/c: number -> what was saved."""
    states = {step: state_of(step) for step in (1, 2, 3)}
    with Checkpoints(tmp_path / "c") as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, {"note": step})
    return {step: jax.device_get(state) for step, state in states.items()}

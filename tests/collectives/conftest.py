"""What the tests of collectives share: running a function on every rank."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxdp import on_mesh
from jaxdp.mesh import AXIS


@pytest.fixture
def jitted(mesh_of):
    """(n, function) -> a jitted function of each rank's row of every array.

    Its results have a leading dimension of ranks.
    """

    def make(n, function):
        def body(*rows):
            return jax.tree.map(lambda y: y[None], function(*(row[0] for row in rows)))

        return jax.jit(on_mesh(body, mesh_of(n), P(AXIS), P(AXIS)))

    return make


@pytest.fixture
def on_ranks(jitted):
    """(function, *arrays) -> its results on as many ranks as the arrays have rows, in NumPy."""
    return lambda function, *arrays: jax.device_get(jitted(len(arrays[0]), function)(*arrays))

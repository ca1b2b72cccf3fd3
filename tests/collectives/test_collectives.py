"""Every algorithm against NumPy, on devices and in simulation, for every n, size, op and dtype."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdp import on_mesh
from jaxdp.collectives import (
    ALGORITHMS,
    OPS,
    all_gather,
    all_reduce,
    make_schedule,
    reduce_scatter,
    simulate,
)
from jaxdp.config import ALGORITHMS as CONFIGURABLE
from jaxdp.errors import UserError
from jaxdp.mesh import AXIS

SCHEDULED = [name for name, row in ALGORITHMS.items() if row.all_reduce]
DTYPES = (np.float32, jnp.bfloat16, np.float16, np.int32)


def on_ranks(mesh, function, *arrays):
    """`function` of each rank's row of every array; results with a leading dim of ranks."""

    def body(*rows):
        return jax.tree.map(lambda y: y[None], function(*(row[0] for row in rows)))

    return jax.device_get(jax.jit(on_mesh(body, mesh, P(AXIS), P(AXIS)))(*arrays))


def exact(rng, shape, op, dtype):
    """Random integers whose reduction over nine ranks is exact in every dtype."""
    choices = [-2, -1, 1] if op == "product" else np.arange(-6, 7)
    return rng.choice(choices, shape).astype(dtype)


def reduced(x, op):
    return OPS[op].numpy.reduce(x.astype(np.float64), axis=0)


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_v10_v11_all_reduce_is_exact_on_integers(algorithm, n, mesh_of, rng, request):
    shapes = [(0,), (1,), (n - 1,), (n,), (n + 1,), (1000,), (1001,), (7, 11), ()]
    cases = list(itertools.product(OPS, DTYPES, shapes))
    if not request.config.option.every_case:
        cases = [cases[i] for i in rng.choice(len(cases), 9, replace=False)]
    inputs = [exact(rng, (n, *shape), op, dtype) for op, dtype, shape in cases]

    def reduce_all(*xs):
        return [
            all_reduce(x, AXIS, algorithm=algorithm, op=op)
            for (op, _, _), x in zip(cases, xs, strict=True)
        ]

    outputs = on_ranks(mesh_of(n), reduce_all, *inputs)
    for (op, dtype, shape), x, y in zip(cases, inputs, outputs, strict=True):
        assert (y.dtype, y.shape) == (dtype, (n, *shape))
        np.testing.assert_array_equal(
            y.astype(np.float64), np.broadcast_to(reduced(x, op), x.shape)
        )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("algorithm", SCHEDULED)
def test_simulation_equals_numpy(algorithm, n, op, rng):
    for size in (0, 1, n - 1, n, n + 1, 1000, 1001):
        x = exact(rng, (n, size), op, np.float32)
        for y in simulate(make_schedule(algorithm, "all_reduce", n), list(x), op):
            np.testing.assert_array_equal(y, reduced(x, op))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounding_stays_within_the_dtype_and_replicas_agree_to_the_bit(algorithm, n, mesh_of, rng):
    x = rng.normal(size=(n, 1001))
    for dtype in (np.float32, jnp.bfloat16, np.float16):
        values = x.astype(dtype)
        y = on_ranks(mesh_of(n), lambda row: all_reduce(row, AXIS, algorithm=algorithm), values)
        bound = n * jnp.finfo(dtype).eps * np.abs(values.astype(np.float64)).sum(0)
        error = np.abs(y[0].astype(np.float64) - reduced(values, "sum"))
        assert (error <= bound).all()
        assert all(row.tobytes() == y[0].tobytes() for row in y)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_v12_padding_nan_and_zero(algorithm, op, mesh_of):
    n = 3
    x = np.full((n, 5), {"max": -7, "min": 7, "product": 3}[op], np.float32)
    x[1, 2] = np.nan
    x[:, 4] = [0.0, -0.0, 0.0]
    y = on_ranks(mesh_of(n), lambda row: all_reduce(row, AXIS, algorithm=algorithm, op=op), x)
    expected = OPS[op].numpy.reduce(x, axis=0)
    assert np.isnan(y[:, 2]).all()
    np.testing.assert_array_equal(y, np.broadcast_to(expected, x.shape))  # 0.0 equals -0.0


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize(
    "algorithm", [a for a, row in ALGORITHMS.items() if row.reduce_scatter or a == "psum"]
)
def test_reduce_scatter_and_all_gather(algorithm, n, mesh_of, rng):
    x = exact(rng, (n, 4 * n, 3), "sum", np.float32)
    part = on_ranks(mesh_of(n), lambda row: reduce_scatter(row, AXIS, algorithm=algorithm), x)
    np.testing.assert_array_equal(part.reshape(4 * n, 3), reduced(x, "sum"))
    whole = on_ranks(mesh_of(n), lambda row: all_gather(row, AXIS, algorithm=algorithm), part)
    np.testing.assert_array_equal(whole, np.broadcast_to(reduced(x, "sum"), x.shape))
    if algorithm in SCHEDULED:
        simulated = simulate(make_schedule(algorithm, "reduce_scatter", n), list(x))
        np.testing.assert_array_equal(np.stack(simulated), part)
        gathered = simulate(make_schedule(algorithm, "all_gather", n), simulated)
        np.testing.assert_array_equal(np.stack(gathered), whole)


def test_every_contribution_is_counted_once(mesh_of):
    # rank r gives (n + 1) ** r: a lost or doubled contribution shows as a digit other than 1
    for algorithm in ALGORITHMS:
        for n in (2, 3, 5, 7):
            x = ((n + 1.0) ** np.arange(n, dtype=np.float32))[:, None] * np.ones(
                (1, 13), np.float32
            )
            y = on_ranks(mesh_of(n), lambda row, a=algorithm: all_reduce(row, AXIS, algorithm=a), x)
            assert (y == sum((n + 1) ** r for r in range(n))).all()


def test_mistakes_are_one_line(mesh_of):
    x = np.ones((2, 3), np.float32)

    def message(function, x=x):
        with pytest.raises(UserError) as error:
            on_ranks(mesh_of(2), function, x)
        assert len(error.value.lines) == 1
        return str(error.value)

    assert "expected one of psum, ring" in message(lambda x: all_reduce(x, AXIS, algorithm="rng"))
    assert "a mean is a sum" in message(lambda x: all_reduce(x, AXIS, op="mean"))
    assert "multiple of 2: pad it" in message(lambda x: reduce_scatter(x, AXIS))
    assert "cast it" in message(lambda x: all_reduce(x, AXIS), x > 0)
    assert "x[None]" in message(lambda x: all_gather(x[0], AXIS))


def test_the_config_knows_the_table():
    assert set(CONFIGURABLE) == set(ALGORITHMS)

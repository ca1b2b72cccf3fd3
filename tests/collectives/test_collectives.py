"""Every algorithm against NumPy, on devices and in simulation, for every n, size, op and dtype."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.collectives import (
    ALGORITHMS,
    OPS,
    algorithms_for,
    all_gather,
    all_reduce,
    broadcast,
    make_schedule,
    reduce_scatter,
    simulate,
)
from jaxdp.config import ALGORITHMS as CONFIGURABLE
from jaxdp.errors import UserError
from jaxdp.mesh import AXIS

SCHEDULED = algorithms_for("all_reduce", scheduled=True)
DTYPES = (np.float32, jnp.bfloat16, np.float16, np.int32)
OPTIONS = [
    ("hierarchical", 8, {"local_size": 1}),
    ("hierarchical", 8, {"local_size": np.int64(4)}),
    ("hierarchical", 8, {"local_size": 4}),
    ("hierarchical", 6, {"local_size": 3}),
    ("hierarchical", 9, {"local_size": 9}),
    ("double_tree", 7, {"segments": 1}),
    ("double_tree", 8, {"segments": 3}),
]


def exact(rng, shape, op, dtype):
    """Random integers whose reduction over nine ranks is exact in every dtype."""
    choices = [-2, -1, 1] if op == "product" else np.arange(-6, 7)
    return rng.choice(choices, shape).astype(dtype)


def reduced(x, op):
    return OPS[op].numpy.reduce(x.astype(np.float64), axis=0)


def exists(algorithm, n):
    """Whether an algorithm's reduce-scatter and all-gather exist for n ranks."""
    return algorithm != "halving_doubling" or n in (1, 2, 4, 8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_v10_v11_all_reduce_is_exact_on_integers(algorithm, on_ranks, rng, few):
    for n in few(range(1, 10), 1):
        shapes = [(0,), (1,), (n - 1,), (n,), (n + 1,), (1000,), (1001,), (7, 11), ()]
        cases = few(itertools.product(OPS, DTYPES, shapes), 6)
        inputs = [exact(rng, (n, *shape), op, dtype) for op, dtype, shape in cases]

        def reduce_all(*xs, cases=cases):
            return [
                all_reduce(x, AXIS, algorithm=algorithm, op=op)
                for (op, _, _), x in zip(cases, xs, strict=True)
            ]

        outputs = on_ranks(reduce_all, *inputs)
        for (op, dtype, shape), x, y in zip(cases, inputs, outputs, strict=True):
            assert (y.dtype, y.shape) == (dtype, (n, *shape))
            np.testing.assert_array_equal(
                y.astype(np.float64), np.broadcast_to(reduced(x, op), x.shape)
            )


@pytest.mark.parametrize("algorithm", SCHEDULED)
def test_simulation_equals_numpy(algorithm, rng):
    for n, op in itertools.product(range(1, 10), OPS):
        schedule = make_schedule(algorithm, "all_reduce", n)
        for size in (0, 1, n - 1, n, n + 1, 100, 101):
            x = exact(rng, (n, size), op, np.float32)
            for y in simulate(schedule, list(x), op):
                np.testing.assert_array_equal(y, reduced(x, op))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounding_stays_within_the_dtype(algorithm, on_ranks, rng, few):
    dtypes = (np.float32, jnp.bfloat16, np.float16)
    for n in few([2, 3, 5, 8], 1):
        inputs = [rng.normal(size=(n, 1001)).astype(dtype) for dtype in dtypes]
        outputs = on_ranks(
            lambda *xs: [all_reduce(x, AXIS, algorithm=algorithm) for x in xs], *inputs
        )
        for x, y in zip(inputs, outputs, strict=True):
            bound = n * jnp.finfo(x.dtype).eps * np.abs(x.astype(np.float64)).sum(0)
            error = np.abs(y[0].astype(np.float64) - reduced(x, "sum"))
            assert (error <= bound).all()
            assert all(row.tobytes() == y[0].tobytes() for row in y)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_v12_padding_nan_and_zero(algorithm, on_ranks):
    fill = {"max": -7, "min": 7, "product": 3}
    x = np.stack([np.full((3, 5), value, np.float32) for value in fill.values()], axis=1)
    x[1, :, 2] = np.nan
    x[:, :, 4] = np.array([0.0, -0.0, 0.0])[:, None]
    y = on_ranks(
        lambda row: [
            all_reduce(row[i], AXIS, algorithm=algorithm, op=op) for i, op in enumerate(fill)
        ],
        x,
    )
    for i, op in enumerate(fill):
        expected = OPS[op].numpy.reduce(x[:, i], axis=0)
        assert np.isnan(y[i][:, 2]).all()
        np.testing.assert_array_equal(y[i], np.broadcast_to(expected, (3, 5)))  # 0.0 equals -0.0


@pytest.mark.parametrize("algorithm", algorithms_for("reduce_scatter"))
def test_reduce_scatter_and_all_gather(algorithm, on_ranks, rng, few):
    for n in few([n for n in range(1, 10) if exists(algorithm, n)], 2):
        [op] = few(OPS, 1) if n > 1 else ["sum"]
        x = exact(rng, (n, 5 * n, 3), op, np.float32)

        def both(row, op=op):
            part = reduce_scatter(row, AXIS, algorithm=algorithm, op=op)
            return part, all_gather(part, AXIS, algorithm=algorithm)

        part, whole = on_ranks(both, x)
        np.testing.assert_array_equal(part.reshape(5 * n, 3), reduced(x, op))
        np.testing.assert_array_equal(whole, np.broadcast_to(reduced(x, op), x.shape))
        if algorithm in SCHEDULED:
            simulated = simulate(make_schedule(algorithm, "reduce_scatter", n), list(x), op)
            np.testing.assert_array_equal(np.stack(simulated), part)
            gathered = simulate(make_schedule(algorithm, "all_gather", n), simulated)
            np.testing.assert_array_equal(np.stack(gathered), whole)


@pytest.mark.parametrize("algorithm", ["psum", "ring"])
def test_nothing_is_nothing(algorithm, on_ranks):
    x = np.zeros((3, 0, 5), np.float32)
    scattered = on_ranks(
        lambda row: [reduce_scatter(row, AXIS, algorithm=algorithm, op=op) for op in OPS], x
    )
    gathered = on_ranks(lambda row: all_gather(row, AXIS, algorithm=algorithm), x)
    assert all(y.shape == x.shape for y in [*scattered, gathered])


@pytest.mark.parametrize("algorithm", algorithms_for("broadcast"))
def test_broadcast_is_the_roots_array_to_the_bit(algorithm, on_ranks, rng, few):
    for n in few(range(1, 10), 2):
        root = int(rng.integers(n))
        inputs = [rng.normal(size=(n, 5, 7)).astype(dtype) * 100 for dtype in DTYPES]
        for x in inputs[:3]:
            x[:, 0, :4] = [-0.0, np.nan, np.inf, np.finfo(np.float32).tiny]
        inputs += [np.zeros((n, 0), np.float32), rng.integers(0, 2**8, (n, 3)).astype(np.uint8)]
        outputs = on_ranks(
            lambda *xs, root=root: [broadcast(x, AXIS, root=root, algorithm=algorithm) for x in xs],
            *inputs,
        )
        for x, y in zip(inputs, outputs, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert all(row.tobytes() == x[root].tobytes() for row in y)
        if algorithm in algorithms_for("broadcast", scheduled=True):
            schedule = make_schedule(algorithm, "broadcast", n, root=root)
            for y in simulate(schedule, list(inputs[0])):
                np.testing.assert_array_equal(y, inputs[0][root])


@pytest.mark.parametrize(("algorithm", "n", "options"), OPTIONS)
def test_options_change_the_way_and_not_the_result(algorithm, n, options, on_ranks, rng):
    x = exact(rng, (n, 101), "sum", np.float32)
    y = on_ranks(lambda row: all_reduce(row, AXIS, algorithm=algorithm, **options), x)
    np.testing.assert_array_equal(y, np.broadcast_to(reduced(x, "sum"), x.shape))
    changed, default = (make_schedule(algorithm, "all_reduce", n, **o) for o in (options, {}))
    assert changed.rounds != default.rounds
    assert changed is make_schedule(algorithm, "all_reduce", n, **options)


def test_every_contribution_is_counted_once(on_ranks, few):
    # rank r gives (n + 1) ** r: a lost or doubled contribution shows as a digit other than 1
    for n in few(range(2, 8), 2):
        x = ((n + 1.0) ** np.arange(n, dtype=np.float32))[:, None] * np.ones((1, 13), np.float32)
        y = on_ranks(lambda row: [all_reduce(row, AXIS, algorithm=a) for a in ALGORITHMS], x)
        for result in y:
            assert (result == sum((n + 1) ** r for r in range(n))).all()


def test_mistakes_are_one_line(on_ranks):
    x = np.ones((3, 3), np.float32)

    def message(function, x: np.ndarray = x):
        with pytest.raises(UserError) as error:
            on_ranks(function, x)
        assert len(error.value.lines) == 1
        assert "\n" not in str(error.value)
        return str(error.value)

    def reduce(algorithm, **options):
        return message(lambda x: all_reduce(x, AXIS, algorithm=algorithm, **options))

    assert f"expected one of {', '.join(ALGORITHMS)}" in reduce("rng")
    assert "a mean is a sum" in reduce("ring", op="mean")
    assert "multiple of 3: pad it" in message(lambda x: reduce_scatter(x[:2], AXIS))
    assert "cast it" in message(lambda x: all_reduce(x, AXIS), x > 0)
    assert "axis 'date' is not there; expected the name of a mesh axis" in message(
        lambda x: all_reduce(x, "date")
    )
    for given in ({"a": 1}, [1, 2], "ring", None):
        assert f"a value of type {type(given).__name__} was given" in message(
            lambda x, given=given: all_reduce(given, AXIS)
        )
    assert "x[None]" in message(lambda x: all_gather(x[0], AXIS))
    assert "root=3 on 3 ranks; expected a rank of 0 to 2" in message(
        lambda x: broadcast(x, AXIS, root=3)
    )
    assert "hierarchical has no option 'nodes'; expected local_size" in reduce(
        "hierarchical", nodes=2
    )
    assert "psum has no option 'segments'; it takes none" in reduce("psum", segments=2)
    assert "local_size=2 on 3 ranks; expected a divisor of 3: one of 1, 3" in reduce(
        "hierarchical", local_size=2
    )
    assert "local_size=1.5; expected a whole number" in reduce("hierarchical", local_size=1.5)
    assert "segments=None; expected a whole number" in reduce("double_tree", segments=None)
    assert "segments=0; expected at least 1" in reduce("double_tree", segments=0)
    assert "tree has no reduce_scatter; expected one of psum, ring" in message(
        lambda x: reduce_scatter(x, AXIS, algorithm="tree")
    )
    assert "3 ranks; expected a power of two: use ring" in message(
        lambda x: reduce_scatter(x, AXIS, algorithm="halving_doubling")
    )
    for collective in (all_reduce, reduce_scatter, all_gather, broadcast):
        with pytest.raises(UserError, match="inside of shard_map: see jaxdp"):
            collective(x, AXIS)
    with pytest.raises(UserError, match="psum has no all_reduce schedule; expected one of ring"):
        make_schedule("psum", "all_reduce", 4)


def test_numbers_and_numpy_arrays_are_arrays(on_ranks):
    def body(row):
        given = [all_reduce(x, AXIS, algorithm="ring") for x in (2, 0.5, np.float32([3, 4]))]
        return given, row

    (a, b, c), _ = on_ranks(body, np.ones((3, 2), np.float32))
    assert (np.asarray(a) == 6).all()
    assert (np.asarray(b) == 1.5).all()
    assert (np.asarray(c).reshape(-1, 2) == [9, 12]).all()


def test_the_config_knows_the_table():
    assert (*ALGORITHMS, "auto") == CONFIGURABLE

"""nccl-tests' definitions, and inputs that reduce exactly."""

import numpy as np
import pytest

from jaxdp.comparison.cases import (
    DTYPES,
    Case,
    bus_factor,
    elements,
    expected,
    payload_bytes,
    random_input,
    shown_count,
)


@pytest.mark.parametrize(
    ("op", "given", "nbytes", "count", "factor"),
    [
        ("all_reduce", 1024, 4096, 1024, 1.5),
        ("broadcast", 1024, 4096, 1024, 1.0),
        ("reduce_scatter", 1024, 4096, 256, 0.75),
        ("all_gather", 256, 4096, 256, 0.75),
    ],
)
def test_bytes_count_and_bus_bandwidth_are_those_of_nccl_tests(op, given, nbytes, count, factor):
    n = 4
    assert elements(op, 4096, "float32", n) == given
    case = Case(op, "sum", "psum", "float32", (given,))
    assert (payload_bytes(case, n), shown_count(case, n)) == (nbytes, count)
    assert bus_factor(op, n) == factor


@pytest.mark.parametrize("n", [2, 3, 8, 9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("redop", ["sum", "max", "min", "product"])
def test_inputs_differ_between_ranks_and_reduce_exactly(redop, dtype, n):
    case = Case("all_reduce", redop, "psum", dtype, (997,))
    x = random_input(case, n, 0, seed=3)
    assert len({row.tobytes() for row in x}) == n
    right = expected(case, x)[0]
    # exact in the dtype, whatever the order
    for order in (np.arange(n), np.arange(n)[::-1]):
        total = x[order[0]]
        for rank in order[1:]:
            total = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}[
                redop
            ](total, x[rank]).astype(x.dtype)
        np.testing.assert_array_equal(total.astype(np.float64), right)

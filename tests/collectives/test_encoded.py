"""All-reduce of encoded vectors: bounds of the error, replicas to the bit, bytes as planned."""

import numpy as np
import pytest

from jaxdp import hlo
from jaxdp.collectives import ALGORITHMS, codec
from jaxdp.collectives.codec import BLOCK, CODECS, exact, power_of_two
from jaxdp.collectives.encoded import all_reduce_encoded, can_carry, planned_encoded
from jaxdp.mesh import AXIS
from jaxdp.plan import Plan, as_planned, compare

SIZE, SCALARS = 5003, 6
PAIRS = [(w, a) for w in CODECS for a in ALGORITHMS if can_carry(a, CODECS[w](2))]


def codecs_of(wire, n):
    rounded = CODECS[wire](n)
    return [rounded, exact(np.float32, rounded.word)]


def reduction(wire, algorithm, n):
    """Of gradients and scalars that were just multiplied, as clipped or averaged ones are."""
    codecs = codecs_of(wire, n)

    def run(x, y):
        scaled = [x * np.float32(0.123), y * np.float32(0.77)]
        return all_reduce_encoded(scaled, codecs, AXIS, algorithm)

    return run


def bound(wire, algorithm, x):
    """The most that the sum over ranks may be off, by roundings of half a unit each.

    A contribution that passes k roundings of relative error u is off by (1 + u)^k - 1 at most:
    k = 1 where all is gathered, 2 in the all-to-all form, and in a schedule one for itself and one
    for each addition, of which there are n - 1.
    """
    n, size = len(x), np.abs(x).sum(0)
    float32 = n * 2.0**-23 * size
    if wire == "int8":
        padded = np.pad(np.abs(x), ((0, 0), (0, -SIZE % BLOCK))).reshape(n, -1, BLOCK)
        top = padded.max(-1).sum(0) / 254
        if algorithm != "all_gather_sum":  # the sum is rounded too, and it holds the first error
            top += (padded.sum(0).max(-1) + top) / 254
        return np.repeat(top, BLOCK)[:SIZE] * (1 + 2.0**-18) + float32
    roundings = {"all_gather_sum": 1, "all_to_all": 2, "psum": 2}.get(algorithm, n)
    u = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[wire]
    small = 2.0**-25 * power_of_two(n) * n if wire == "float16" else 0
    return size * ((1 + u) ** roundings - 1) + float32 + roundings * small


@pytest.mark.parametrize(("wire", "algorithm"), PAIRS)
def test_error_agreement_and_bytes(wire, algorithm, jitted, rng, few):
    for n in few([2, 3, 4, 8, 9], 1):
        x = (rng.normal(size=(n, SIZE)) * 2.0 ** rng.integers(-8, 8, SIZE)).astype(np.float32)
        y = rng.integers(-1000, 1000, (n, SCALARS)).astype(np.float32)
        run = jitted(n, reduction(wire, algorithm, n))
        sums, scalars = (np.asarray(result) for result in run(x, y))
        for result in (sums, scalars):
            assert len({row.tobytes() for row in result}) == 1, "replicas differ"
        given = np.float64(x * np.float32(0.123))
        error = np.abs(sums[0] - given.sum(0))
        assert (error <= bound(wire, algorithm, given)).all(), (
            error / bound(wire, algorithm, given)
        ).max()
        np.testing.assert_allclose(
            scalars[0], np.float64(y * np.float32(0.77)).sum(0), rtol=1e-6, atol=1e-3
        )
        planned = planned_encoded("b", (SIZE, SCALARS), codecs_of(wire, n), algorithm, n)
        found = hlo.collectives(run.lower(x, y).compile().as_text())
        assert as_planned(Plan(planned), found), compare(Plan(planned), found)


def test_bytes_are_those_of_the_formula():
    n, scalars = 4, SCALARS * 4
    for wire, per_value in (("bfloat16", 2), ("float16", 2), ("int8", 1 + 4 / BLOCK)):
        [exchange, gather] = planned_encoded(
            "b", (4 * n * BLOCK, SCALARS), codecs_of(wire, n), "all_to_all", n
        )
        padded = scalars + 2 * 4  # six scalars in chunks of two
        assert exchange.result_bytes == gather.result_bytes == 4 * n * BLOCK * per_value + padded
        assert exchange.sent_bytes == exchange.result_bytes * (n - 1) / n


def test_not_finite_on_one_rank_is_so_on_all(on_ranks, rng):
    for wire, algorithm in PAIRS:
        n = 3
        x = rng.normal(size=(n, SIZE)).astype(np.float32)
        at = rng.choice(SIZE // BLOCK, 3, replace=False) * BLOCK + rng.integers(BLOCK, size=3)
        x[1, at] = np.nan, np.inf, -np.inf
        sums, _ = on_ranks(reduction(wire, algorithm, n), x, np.zeros((n, 1), np.float32))
        assert not np.isfinite(sums[:, at]).any(), (wire, algorithm)
        assert np.isfinite(sums).mean() > 0.8


def test_what_cannot_be_carried():
    assert not can_carry("ring", codec.int8(4))
    assert not can_carry("psum_scatter_gather", codec.bfloat16(4))
    assert can_carry("ring", codec.bfloat16(4))

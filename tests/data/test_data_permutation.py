"""The shuffle is a bijection, a function of (seed, epoch), and spreads examples evenly."""

import math
from collections import Counter

import numpy as np
import pytest

from jaxdp.data.permutation import permute

SIZES = [*range(1, 70), 97, 127, 128, 129, 255, 257, 1023, 1024, 1025, 1797, 7919, 65535, 65537]


@pytest.mark.parametrize("seed", [0, -3, 2**70 + 1])
def test_every_example_exactly_once(seed):
    for n in SIZES:
        order = permute(seed, 2, n, np.arange(n))
        assert order.dtype == np.int64
        np.testing.assert_array_equal(np.sort(order), np.arange(n), err_msg=f"n = {n}")


@pytest.mark.parametrize("n", [2**31 - 1, 2**40 + 15, 2**61 - 1])
def test_large_n_without_collisions(n):
    positions = np.unique(np.random.default_rng(n).integers(0, n, 100_000))
    order = permute(11, 3, n, positions)
    assert len(np.unique(order)) == len(positions)
    assert order.min() >= 0
    assert order.max() < n
    # A uniform sample has this mean within 5 standard errors.
    error = n / math.sqrt(12 * len(positions))
    assert abs(order.mean() - (n - 1) / 2) < 5 * error


def test_d5_another_order_in_every_epoch_and_for_every_seed():
    n = 1797
    orders = [permute(seed, epoch, n, np.arange(n)) for seed in range(5) for epoch in range(5)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            # Two independent orders agree at about one position (Poisson); 12 has odds of 1e-9.
            assert np.count_nonzero(a == b) < 12


def test_a_function_of_its_arguments_in_any_grouping():
    n, epochs = 1009, np.repeat([0, 1, 7, 8], 1009)
    positions = np.tile(np.arange(n), 4)
    together = permute(5, epochs, n, positions)
    for k, epoch in enumerate([0, 1, 7, 8]):
        apart = permute(5, epoch, n, np.arange(n))
        np.testing.assert_array_equal(together[k * n : (k + 1) * n], apart)
    mixed = np.random.default_rng(0).permutation(4 * n)
    np.testing.assert_array_equal(permute(5, epochs[mixed], n, positions[mixed]), together[mixed])


def test_more_positions_than_one_pass_and_any_shape():
    n = 50_021
    order = permute(1, 0, n, np.arange(n))
    np.testing.assert_array_equal(np.sort(order), np.arange(n))
    square = np.random.default_rng(1).integers(0, n, (3, 40, 5))
    np.testing.assert_array_equal(permute(1, 0, n, square), order[square])
    assert permute(1, 0, n, np.empty(0, np.int64)).shape == (0,)


@pytest.mark.parametrize(("n", "places"), [(4, (0, 1, 2, 3)), (16, (0, 1)), (61, (0, 60))])
def test_joint_places_are_uniform(n, places):
    """Chi-squared over many epochs: all (ordered) outcomes at `places` come equally often."""
    trials = 60_000
    epochs = np.repeat(np.arange(trials), len(places))
    order = permute(7, epochs, n, np.tile(places, trials)).reshape(trials, -1)
    counts = Counter(map(tuple, order.tolist()))
    outcomes = math.perm(n, len(places))
    expected = trials / outcomes
    chi_squared = sum((c - expected) ** 2 for c in counts.values()) / expected
    chi_squared += (outcomes - len(counts)) * expected
    assert abs(chi_squared - (outcomes - 1)) < 5 * math.sqrt(2 * (outcomes - 1))


def test_the_order_is_fixed_for_ever():
    """A resumed run of a later version must see the same stream: these may never change."""
    assert permute(0, 0, 10, np.arange(10)).tolist() == GOLDEN_10
    assert permute(42, 7, 2**40, np.array([0, 1, 2**39])).tolist() == GOLDEN_2_40


GOLDEN_10 = [0, 8, 3, 5, 2, 6, 4, 1, 7, 9]
GOLDEN_2_40 = [641251623518, 934229629111, 619329426439]


@pytest.mark.parametrize(("n", "positions"), [(0, []), (2**62, [0]), (5, [5]), (5, [-1])], ids=str)
def test_out_of_range_is_refused(n, positions):
    with pytest.raises(ValueError, match="expected"):
        permute(0, 0, n, np.array(positions, np.int64))


def test_epochs_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="epoch has shape"):
        permute(0, np.array([0, 1]), 5, np.arange(4))

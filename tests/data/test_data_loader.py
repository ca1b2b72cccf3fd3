"""The stream of batches (law 4) and the batches of an evaluation."""

import threading
from collections import Counter

import numpy as np
import pytest

from jaxdp.data import Loader, eval_batches
from jaxdp.data.permutation import permute
from jaxdp.errors import UserError


class Numbers:
    """Example i is `values[i]`, a random number that stands for i."""

    def __init__(self, n):
        self.values = np.random.default_rng(n).permutation(10 * n)[:n]

    def __len__(self):
        return len(self.values)

    def __getitem__(self, indices, /):
        return {"value": self.values[indices], "pair": np.stack([indices, -indices], 1)}


def stream(n, batch, seed, steps):
    """The oracle: the definition of the stream, one position at a time."""
    orders = {}
    result = []
    for p in range(batch * steps):
        epoch, place = divmod(p, n)
        if epoch not in orders:
            orders[epoch] = permute(seed, epoch, n, np.arange(n))
        result.append(orders[epoch][place])
    return np.array(result).reshape(steps, batch)


@pytest.mark.parametrize(
    ("n", "batch"), [(145, 48), (103, 16), (7, 7), (5, 3), (1, 1), (20011, 64)]
)
def test_d2_each_example_once_an_epoch_and_batches_straddle(n, batch):
    steps = 3 * n // batch + 2
    loader = Loader(Numbers(n), batch, seed=4)
    seen = np.stack([loader.indices(step) for step in range(steps)])
    np.testing.assert_array_equal(seen, stream(n, batch, 4, steps))
    for epoch in range(3):
        part = seen.reshape(-1)[epoch * n : (epoch + 1) * n]
        np.testing.assert_array_equal(np.sort(part), np.arange(n))


def test_d5_every_epoch_and_seed_has_its_own_order():
    n, batch = 600, 200
    orders = [
        np.concatenate([Loader(Numbers(n), batch, seed).indices(3 * e + i) for i in range(3)])
        for seed in (0, 1)
        for e in (0, 1)
    ]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert np.count_nonzero(a == b) < 12


def test_random_access_equals_sequential():
    n, batch, steps = 1009, 37, 2000  # several blocks of steps
    loader = Loader(Numbers(n), batch, seed=9)
    sequential = np.stack([loader.indices(step) for step in range(steps)])
    fresh = Loader(Numbers(n), batch, seed=9)
    for step in np.random.default_rng(0).integers(0, steps, 200):
        np.testing.assert_array_equal(fresh.indices(int(step)), sequential[step])


def test_far_steps_need_no_steps_before_them():
    step, batch, n = 10**12, 48, 145
    positions = step * batch + np.arange(batch)
    expected = [permute(3, p // n, n, np.array([p % n]))[0] for p in positions.tolist()]
    np.testing.assert_array_equal(Loader(Numbers(n), batch, seed=3).indices(step), expected)


def test_d1_processes_that_load_their_own_rows_load_the_batch_between_them():
    n, batch = 145, 48
    source = Numbers(n)
    loader = Loader(source, batch, seed=1)
    for step in (0, 3, 77):
        whole = loader.batch(step)
        np.testing.assert_array_equal(whole["value"], source.values[loader.indices(step)])
        parts = [loader.batch(step, slice(i, None, 3)) for i in range(3)]
        for name in whole:
            joined = np.empty_like(whole[name])
            for i, part in enumerate(parts):
                joined[i::3] = part[name]
            np.testing.assert_array_equal(joined, whole[name])
        rows = np.random.default_rng(step).integers(0, batch, 10)
        np.testing.assert_array_equal(loader.indices(step, rows), loader.indices(step)[rows])


@pytest.mark.parametrize(("n", "batch"), [(145, 48), (103, 16)])
def test_d8_one_shape_for_the_whole_run(n, batch):
    loader = Loader(Numbers(n), batch, seed=0)
    shapes = {tuple(v.shape for v in loader.batch(step).values()) for step in range(50)}
    assert shapes == {((batch,), (batch, 2))}
    shapes = {tuple(v.shape for v in b.values()) for b in eval_batches(Numbers(n), batch)}
    assert shapes == {((batch,), (batch, 2), (batch,))}


def test_epoch_counts_whole_passes_before_the_step():
    loader = Loader(Numbers(145), 48, seed=0)
    assert [loader.epoch(step) for step in (0, 3, 4, 6, 7)] == [0, 0, 1, 1, 2]


def test_indices_cannot_be_changed_by_a_caller():
    indices = Loader(Numbers(20), 5, seed=0).indices(0)
    with pytest.raises(ValueError, match="read-only"):
        indices[0] = 3


def test_threads_share_a_loader():
    n, batch, steps = 997, 64, 1200
    loader = Loader(Numbers(n), batch, seed=2)
    expected = stream(n, batch, 2, steps)
    wrong = []

    def read(seed):
        for step in np.random.default_rng(seed).integers(0, steps, 60).tolist():
            if not np.array_equal(loader.indices(step), expected[step]):
                wrong.append(step)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(("n", "batch"), [(0, 4), (3, 4), (47, 48)])
def test_d6_smaller_than_a_batch_is_refused_with_both_numbers(n, batch):
    with pytest.raises(UserError) as caught:
        Loader(Numbers(n), batch, seed=0)
    assert len(caught.value.lines) == 1
    assert f"{n} examples" in str(caught.value)
    assert f"batch is {batch}" in str(caught.value)


def test_nonsense_is_refused():
    with pytest.raises(UserError, match="global batch is 0"):
        Loader(Numbers(4), 0, seed=0)
    with pytest.raises(ValueError, match="step is -1"):
        Loader(Numbers(4), 2, seed=0).indices(-1)
    with pytest.raises(UserError, match="0 examples"):
        eval_batches(Numbers(0), 4)
    with pytest.raises(UserError, match="batch is 0"):
        eval_batches(Numbers(4), 0)


@pytest.mark.parametrize("n", [1, 21, 103, 104])
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 13, 200])
def test_d3_evaluation_counts_every_example_once_in_order(n, batch):
    source = Numbers(n)
    batches = list(eval_batches(source, batch))
    assert len(batches) == -(-n // batch)
    weight = np.concatenate([b["weight"] for b in batches])
    values = np.concatenate([b["value"] for b in batches])
    assert weight.dtype == np.float32
    assert Counter(weight.tolist()) == Counter({1.0: n, 0.0: -n % batch})
    np.testing.assert_array_equal(values[weight == 1], source.values)
    assert all(v in source.values for v in values[weight == 0])


def test_d3_rows_of_an_evaluation_make_up_the_batch():
    source = Numbers(21)
    whole = list(eval_batches(source, 8))
    parts = [list(eval_batches(source, 8, slice(2 * i, 2 * i + 2))) for i in range(4)]
    for i, batch in enumerate(whole):
        for name in batch:
            joined = np.concatenate([part[i][name] for part in parts])
            np.testing.assert_array_equal(joined, batch[name])


def test_weights_of_the_source_are_kept():
    class Weighted(Numbers):
        def __getitem__(self, indices, /):
            weight = (indices + 0.5).astype(np.float32)
            return {**super().__getitem__(indices), "weight": weight}

    weight = np.concatenate([b["weight"] for b in eval_batches(Weighted(5), 4)])
    assert weight.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 0, 0, 0]

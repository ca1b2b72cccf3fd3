"""Background batches: order, errors, bounds, and no thread left behind."""

import gc
import threading
import time

import pytest

from jaxdp.data import prefetch


def threads():
    return [t for t in threading.enumerate() if t.name == "jaxdp-prefetch"]


def wait_until(condition, limit_s=5.0):
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


@pytest.fixture(autouse=True)
def no_thread_left():
    assert threads() == []
    yield
    wait_until(lambda: threads() == [])


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_every_step_in_order(depth):
    with prefetch(lambda step: step**2, 3, 500, depth) as batches:
        assert list(batches) == [(step, step**2) for step in range(3, 500)]
        assert list(batches) == []


def test_an_empty_range_ends_at_once():
    assert list(prefetch(lambda step: 1 / 0, 5, 5)) == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_more_than_depth_ahead(depth):
    made = []
    with prefetch(made.append, 0, 100, depth) as batches:
        for step, _ in batches:
            wait_until(lambda step=step: len(made) == min(100, step + 1 + depth))
            time.sleep(0.0005)
            assert len(made) <= step + 1 + depth


def test_runs_in_one_other_thread():
    with prefetch(lambda step: threading.get_ident(), 0, 50) as batches:
        makers = {maker for _, maker in batches}
    assert len(makers) == 1
    assert threading.get_ident() not in makers


def test_an_exception_arrives_in_place_of_its_value():
    def make(step):
        if step == 4:
            raise KeyError("record 4")
        return step

    batches = prefetch(make, 0, 100)
    assert [next(batches) for _ in range(4)] == [(i, i) for i in range(4)]
    begin = time.perf_counter()
    with pytest.raises(KeyError, match="record 4") as caught:
        next(batches)
    assert time.perf_counter() - begin < 1
    assert any(entry.name == "make" for entry in caught.traceback)
    assert threads() == []
    assert list(batches) == []


def test_stop_iteration_in_make_is_no_silent_end():
    with prefetch(lambda step: next(iter([])), 0, 10) as batches:  # noqa: SIM117
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(batches)


def test_leaving_the_block_early_ends_the_thread():
    with prefetch(lambda step: step, 0, 10**9) as batches:
        next(batches)
        assert len(threads()) == 1
    assert threads() == []
    batches.close()  # twice is once


def test_an_interrupt_in_the_loop_ends_the_thread():
    def train():
        with prefetch(lambda step: step, 0, 10**9) as batches:
            for step, _ in batches:
                if step == 3:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert threads() == []


def test_a_forgotten_iterator_ends_its_thread():
    batches = prefetch(lambda step: step, 0, 10**9)
    next(batches)
    del batches
    gc.collect()
    wait_until(lambda: threads() == [])
    assert threads() == []


def test_close_releases_a_consumer_that_waits():
    go, got = threading.Event(), []
    batches = prefetch(lambda step: go.wait(5), 0, 10)
    consumer = threading.Thread(target=lambda: got.extend(batches))
    consumer.start()
    closer = threading.Thread(target=batches.close)
    closer.start()
    go.set()
    for thread in (consumer, closer):
        thread.join(5)
        assert not thread.is_alive()


def test_close_gives_up_on_a_make_that_hangs():
    go = threading.Event()
    batches = prefetch(lambda step: go.wait(30), 0, 3)
    begin = time.perf_counter()
    batches.close(timeout_s=0.05)
    assert time.perf_counter() - begin < 2
    assert all(t.daemon for t in threads())
    go.set()


def test_waited_counts_only_waiting():
    with prefetch(lambda step: time.sleep(0.02), 0, 10) as slow_maker:
        list(slow_maker)
    assert 0.15 < slow_maker.waited_s < 2
    with prefetch(lambda step: step, 0, 10) as slow_consumer:
        next(slow_consumer)
        begin = slow_consumer.waited_s
        for _ in slow_consumer:
            time.sleep(0.03)
    assert slow_consumer.waited_s - begin < 0.2


def test_depth_below_one_is_refused():
    with pytest.raises(ValueError, match="depth is 0"):
        prefetch(lambda step: step, 0, 3, depth=0)

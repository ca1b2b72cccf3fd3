"""Sentences that several programs tell alike."""

import pytest

from jaxdp.config import describe_batch, load_config
from jaxdp.wording import counted, ranks


@pytest.mark.parametrize(
    ("n", "noun", "words"),
    [
        (0, "step", "0 steps"),
        (1, "microbatch", "1 microbatch"),
        (2, "microbatch", "2 microbatches"),
        (3, "process", "3 processes"),
        (1, "leaf", "1 leaf"),
        (2, "leaf", "2 leaves"),
    ],
)
def test_counted(n, noun, words):
    assert counted(n, noun) == words


def test_a_batch_of_ones_has_no_plural():
    config = load_config(None, [("global_batch", 4)])
    assert describe_batch(config, 4) == "4 = 1 example x 1 microbatch x 4 devices"
    assert describe_batch(config, 1) == "4 = 4 examples x 1 microbatch x 1 device"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([2], "rank 2"), ([3, 2], "ranks 2, 3"), ([0, 4, 5, 6, 9], "ranks 0, 4 to 6, 9")],
)
def test_ranks(numbers, words):
    assert ranks(numbers) == words

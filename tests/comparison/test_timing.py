"""What is timed is waited for."""

import pytest

from jaxdp.comparison.timing import _seconds_per_call


@pytest.mark.parametrize("calls", [1, 2, 3, 10])
def test_every_call_is_waited_for_and_few_are_in_flight(calls):
    waiting, most = set(), [0]

    class Output:
        def __init__(self):
            waiting.add(self)
            most[0] = max(most[0], len(waiting))

        def block_until_ready(self):
            waiting.discard(self)

    assert _seconds_per_call(Output, calls) > 0
    assert not waiting
    assert most[0] <= 3

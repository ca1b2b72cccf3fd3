"""What asks a job to end, and what ends it at once."""

import os
import signal

from jaxdp.runtime.requests import Requests, noted_requests


def test_only_a_second_press_of_ctrl_c_ends_all_at_once():
    """Ranks that end by SIGINT, one after the other, are no second press."""
    requests = Requests()
    requests.note(signal.SIGINT, "SIGINT ended rank 0")
    requests.note(signal.SIGINT, "SIGINT ended rank 1")
    requests.note(signal.SIGINT)
    assert (requests.number, requests.reason) == (signal.SIGINT, "SIGINT ended rank 0")
    assert not requests.at_once
    requests.note(signal.SIGINT)
    assert requests.at_once


def test_signals_to_this_process_are_noted():
    before = signal.getsignal(signal.SIGINT)
    with noted_requests() as requests:
        for at_once in (False, True):
            os.kill(os.getpid(), signal.SIGINT)
            assert (requests.reason, requests.at_once) == ("SIGINT", at_once)
    assert signal.getsignal(signal.SIGINT) == before

"""Who leaves, and how: what the others hear of it."""

import queue
import socket
from contextlib import ExitStack

import pytest

from jaxdp.runtime.lifeline import Lifeline, Loss
from jaxdp.runtime.rollcall import Roll

WAIT_S = 20.0


class Job:
    """A lifeline for each of n ranks, in one process; one of them may be there as connections only.

    As a process that is killed: its thread does not see its own connections close.
    """

    def __init__(self, n, stack, victim=None):
        hosts = [f"n{rank}" for rank in range(n)]
        self.losses = [queue.Queue() for _ in range(n)]
        pairs = {rank: socket.socketpair() for rank in range(1, n)}
        peers = [{rank: pair[0] for rank, pair in pairs.items()}]
        peers += [{0: pairs[rank][1]} for rank in range(1, n)]
        self.peers = peers
        self.lines = [
            None
            if rank == victim
            else Lifeline(rank, Roll(hosts, peers[rank], ""), self.losses[rank].put)
            for rank in range(n)
        ]
        for line in filter(None, self.lines):
            stack.callback(line.close)

    def heard(self, rank):
        return self.losses[rank].get(timeout=WAIT_S)

    def die(self, rank):
        """As the kernel does it: without a word."""
        for connection in self.peers[rank].values():
            connection.close()


@pytest.fixture
def job():
    with ExitStack() as stack:
        yield lambda n, victim=None: Job(n, stack, victim)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_dies_is_named_to_all(job, victim):
    of = job(4, victim)
    of.die(victim)
    for rank in {0, 1, 2, 3} - {victim}:
        assert of.heard(rank) == Loss(victim, f"n{victim}")
    assert "died without a word" in str(Loss(victim, "n1"))


def test_rank_0_that_dies_is_named_to_all(job):
    of = job(3, victim=0)
    of.die(0)
    assert [of.heard(rank) for rank in (1, 2)] == [Loss(0, "n0")] * 2


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_leaves_says_why(job, leaver):
    of = job(3)
    of.lines[leaver].leave(1, "ValueError: nan")
    for rank in {0, 1, 2} - {leaver}:
        assert of.heard(rank) == Loss(leaver, f"n{leaver}", 1, "ValueError: nan")
    assert str(Loss(2, "n2", 1, "x")) == "rank 2 on n2 left with code 1: x"


def test_ranks_that_come_to_the_end_alarm_nobody(job, rng):
    of = job(4)
    for rank in rng.permutation(4):
        of.lines[rank].leave(0)
        of.lines[rank].close()
    assert all(losses.empty() for losses in of.losses)


def test_who_dies_after_others_came_to_the_end_is_still_heard_of(job):
    of = job(3, victim=2)
    of.lines[1].leave(0)
    of.lines[1].close()
    of.die(2)
    assert of.heard(0) == Loss(2, "n2")


def test_what_is_no_word_is_passed_over(job, rng):
    of = job(3)
    of.peers[1][0].send(rng.bytes(50).replace(b"\n", b"") + b"\n" + b'{"rank": 1}\n')
    of.lines[1].leave(6, "gone")
    assert of.heard(2).code == 6


def test_a_closed_lifeline_leaves_no_thread(job):
    of = job(2)
    for line in of.lines:
        line.close()
        assert not line._thread.is_alive()

"""The roll call between threads: who is missing, what differs, and who may not disturb it."""

import json
import queue
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from jaxdp.errors import AgreedError, PeerError, UserError
from jaxdp.runtime import rollcall
from jaxdp.runtime.lifeline import Lifeline, Loss
from jaxdp.runtime.preflight import Endpoint
from jaxdp.runtime.reports import Report, line_of
from jaxdp.runtime.rollcall import answer_roll, hold_roll

VERSIONS = {"Python": "3.11", "jax": "0.10.2"}
CONFIG = {"steps": "10", "sync.algorithm": "ring"}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(rollcall, "_TELL_S", 0.2)
    monkeypatch.setattr(rollcall, "_PICTURE_S", 0.5)
    monkeypatch.setattr(rollcall, "_RETRY_S", 0.05)


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def report(rank, size, **more):
    return Report(rank, size, **({"versions": VERSIONS, "config": CONFIG} | more))


def endpoint_of(server):
    host, port = server.getsockname()
    return Endpoint(host, port, host)


def call_roll(server, reports, timeout_s=30.0, others_later_s=0.0):
    """Every report's outcome, its Roll or its error, and the lines that were told."""
    outcomes, lines = [None] * len(reports), []

    def run(index, own):
        try:
            if index == 0:
                outcomes[0] = hold_roll(server, own, timeout_s, lines.append)
            else:
                endpoint = endpoint_of(server)
                time.sleep(others_later_s)
                outcomes[index] = answer_roll(endpoint, own, timeout_s, lines.append)
        except (UserError, PeerError) as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(reports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for outcome in outcomes:
        for connection in getattr(outcome, "peers", {}).values():
            connection.close()
    return outcomes, lines


def refused(outcomes):
    """The lines with which everybody was refused."""
    assert {type(outcome) for outcome in outcomes} == {AgreedError}
    (lines,) = {outcome.lines for outcome in outcomes}
    return list(lines)


def test_all_ranks_learn_of_each_other(server, rng):
    size = int(rng.integers(2, 7))
    hosts = [f"n{rng.integers(3)}" for _ in range(size)]
    outcomes, lines = call_roll(server, [report(r, size, host=hosts[r]) for r in range(size)])
    assert [outcome.hosts for outcome in outcomes] == [hosts] * size
    assert outcomes[0].peers.keys() == set(range(1, size))
    assert all(outcome.peers.keys() == {0} for outcome in outcomes[1:])
    assert {outcome.ip for outcome in outcomes} == {"127.0.0.1"}
    assert not any("waiting" in line for line in lines)


def test_p1_missing_ranks_are_named_by_number(server):
    outcomes, lines = call_roll(server, [report(0, 5), report(2, 5)], timeout_s=1.0)
    assert any(line.startswith("waiting for ranks 1, 3, 4 of 5 (") for line in lines)
    assert any(line.startswith("rank 2: reported to rank 0, which waits") for line in lines)
    assert "ranks 1, 3, 4 of 5 did not come within 1 s" in str(outcomes[0])
    assert {type(outcome) for outcome in outcomes} == {PeerError}


def test_p1_rank_0_is_missing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = endpoint_of(server)
    lines = []
    with pytest.raises(PeerError, match=r"rank 0 did not answer at 127\.0\.0\.1:\d+ within 0\.5 s"):
        answer_roll(nobody, report(1, 2), 0.5, lines.append)
    assert "waiting for rank 0" in lines[0]
    assert "refused" in lines[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"versions": VERSIONS | {"jax": "0.12"}}, "jax differs: 0.10.2 on ranks 0, 2; 0.12 on"),
        ({"config": CONFIG | {"steps": "11"}}, "steps differs: 10 on ranks 0, 2; 11 on rank 1"),
        ({"config": {"steps": "10"}}, "sync.algorithm differs: ring on ranks 0, 2; missing on"),
        ({"size": 4}, "number of processes differs: 3 on ranks 0, 2; 4 on rank 1"),
        ({"mistakes": ("no such file",), "host": "n1"}, "rank 1 (n1): no such file"),
    ],
)
def test_r5_a_difference_is_refused_everywhere(server, changes, told):
    reports = [report(r, 3) for r in range(3)]
    reports[1] = replace(reports[1], **changes)
    (line,) = refused(call_roll(server, reports)[0])
    assert line.startswith(told)


def test_a_mistake_that_all_make_is_told_once(server):
    assert refused(call_roll(server, [report(r, 3, mistakes=("typo",)) for r in range(3)])[0]) == [
        "typo"
    ]


def test_two_processes_with_one_rank(server):
    reports = [report(0, 3), report(1, 3, host="a", pid=7), report(1, 3, host="b", pid=8)]
    (line,) = refused(call_roll(server, reports)[0])
    found = ("7 on a and 8 on b", "8 on b and 7 on a")
    assert line in [f"two processes are rank 1: {processes}" for processes in found]


def test_a_rank_that_ends_may_come_again(server, monkeypatch):
    monkeypatch.setattr(rollcall, "_PICTURE_S", 0.2)
    with socket.create_connection(server.getsockname()) as first:
        first.sendall(line_of(vars(report(1, 3, versions={"jax": "old"}))))
    outcomes, _ = call_roll(server, [report(r, 3) for r in range(3)], others_later_s=0.5)
    assert [len(outcome.peers) for outcome in outcomes] == [2, 1, 1]


@contextmanager
def strangers(server, messages):
    """Connections that send what nobody asked for, and stay."""
    connections = [socket.create_connection(server.getsockname()) for _ in messages]
    for connection, message in zip(connections, messages, strict=True):
        connection.sendall(message)
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


def test_strangers_do_not_disturb(server, rng):
    good = json.loads(line_of(vars(report(1, 2))))
    lies = [{"rank": "1"}, {"rank": True}, {"size": 1 << 40}, {"config": {"a": 1}}, {"host": None}]
    messages = [
        b"",
        b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
        rng.bytes(1000) + b"\n",
        b"[" * 100_000 + b"\n",
        b"x" * (1 << 19),
        json.dumps({"speaks": "something else"}).encode() + b"\n",
        json.dumps(good | {"more": 1}).encode() + b"\n",
        *(json.dumps(good | lie).encode() + b"\n" for lie in lies),
    ]
    with strangers(server, messages):
        outcomes, _ = call_roll(server, [report(0, 2), report(1, 2)])
    assert [outcome.peers.keys() for outcome in outcomes] == [{1}, {0}]


def test_something_else_answers(server):
    def answer():
        connection, _ = server.accept()
        with connection:
            while not connection.recv(1 << 16).endswith(b"\n"):
                pass
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(UserError, match=r"what answers at 127\.0\.0\.1:\d+ is not rank 0 of a job"):
        answer_roll(endpoint_of(server), report(1, 2), 10.0, lambda line: None)
    thread.join()


def test_what_follows_the_answer_is_left_to_the_lifeline(server):
    """A third rank died at once: rank 0 told so right behind its answer."""
    answer = line_of({"hosts": ["a", "b", "c"]})
    loss = line_of({"rank": 2, "code": None, "why": ""})

    def tell():
        connection, _ = server.accept()
        with connection:
            while not connection.recv(1 << 16).endswith(b"\n"):
                pass
            connection.sendall(answer + loss)

    thread = threading.Thread(target=tell)
    thread.start()
    roll = answer_roll(endpoint_of(server), report(1, 3), 10.0, lambda line: None)
    thread.join()
    heard = queue.Queue()
    line = Lifeline(1, roll, heard.put)
    try:
        assert heard.get(timeout=20.0) == Loss(2, "c")
    finally:
        line.close()


def test_something_else_hangs_up(server, monkeypatch):
    """As JAX's coordinator does, where a process comes to a job that is complete."""
    monkeypatch.setattr(rollcall, "_HUNG_UP_S", 0.2)
    over = threading.Event()

    def hang_up():
        server.settimeout(0.05)
        while not over.is_set():
            with suppress(TimeoutError):
                server.accept()[0].close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    try:
        with pytest.raises(UserError, match="complete, with another process as rank 1"):
            answer_roll(endpoint_of(server), report(1, 2), 30.0, lambda line: None)
    finally:
        over.set()
        thread.join()

"""Addresses and ports, before anybody waits for anybody."""

import os
import socket
import threading

import pytest

from jaxdp.errors import UserError
from jaxdp.runtime import preflight
from jaxdp.runtime.place import Place
from jaxdp.runtime.preflight import check_place, holder_of, listen, split_address


def at(address, rank=0, size=2, **more):
    return Place(rank, size, address, "a test", **more)


def checked(place):
    lines = []
    return check_place(place, lines.append), lines


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("n1:29500", ("n1", 29500)),
        ("[fd00::1]:1", ("fd00::1", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_addresses(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("localhost", "the port is missing"),
        ("localhost:", "the port is not a number"),
        ("localhost:http", "the port is not a number"),
        ("localhost:99999", "port 99999; expected 1 to 65535"),
        ("localhost:0", "port 0; expected 1 to 65535"),
        (":29500", "expected HOST:PORT"),
        ("fd00::1:29500", r"expected HOST:PORT, as in node1:29500 or \[fd00::1\]:29500"),
        ("http://n1:29500", "expected HOST:PORT"),
        ("0.0.0.0:29500", "stands for all addresses"),
    ],
)
def test_p2_an_address_that_cannot_be(address, told):
    with pytest.raises(UserError, match=told) as error:
        checked(at(address))
    assert len(error.value.lines) == 1
    assert address in str(error.value)


def test_p2_a_host_that_does_not_resolve():
    with pytest.raises(UserError, match=r"host 'no-such-host.invalid' cannot be resolved: \w+"):
        checked(at("no-such-host.invalid:29500"))


def test_a_name_that_comes_with_its_host_is_waited_for(monkeypatch):
    answers = [UserError("cannot be resolved"), UserError("cannot be resolved"), "10.0.0.7"]

    def resolve(host, port):
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    monkeypatch.setattr(preflight, "resolve", resolve)
    monkeypatch.setattr(preflight, "_NAME_RETRY_S", 0.0)
    endpoint, lines = checked(at("job-0-0.job:29500", names_come_late=True))
    assert endpoint.ip == "10.0.0.7"
    assert len(lines) == 2


def test_p2_a_name_server_that_does_not_answer(monkeypatch):
    released = threading.Event()

    def hang(*args, **more):
        released.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with pytest.raises(UserError, match=r"no answer within 0\.1 s"):
            preflight.resolve("n1", 1, within_s=0.1)
    finally:
        released.set()


@pytest.mark.parametrize(
    ("rank", "size", "told"),
    [(2, 2, "the last is 1"), (0, 0, "expected 1 to"), (0, 1 << 20, "expected 1 to 65536")],
)
def test_ranks_and_counts_that_cannot_be(rank, size, told):
    with pytest.raises(UserError, match=told):
        checked(at("localhost:29500", rank, size))


def test_loopback_on_several_hosts(monkeypatch):
    monkeypatch.setattr(preflight, "resolve", lambda host, port: "127.0.1.1")
    # Debian's /etc/hosts: the host's own name
    with pytest.raises(
        UserError, match=r"n1 is 127\.0\.1\.1 on this host, and the job has several"
    ):
        checked(at("n1:29500", one_host=False))
    assert checked(at("n1:29500", rank=1, one_host=False))  # n1 is somewhere else for n2
    with pytest.raises(UserError, match="reaches the processes of one host only"):
        checked(at("localhost:29500", rank=1, one_host=False))
    # nobody said how many hosts there are
    assert "other hosts cannot reach" in checked(at("n1:29500"))[1][0]
    assert checked(at("localhost:29500"))[1] == checked(at("n1:29500", one_host=True))[1] == []


def test_p2_a_port_in_use_names_who_has_it(monkeypatch):
    monkeypatch.setattr(preflight, "_RELEASE_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = at(f"127.0.0.1:{port}")
        with pytest.raises(UserError, match=rf"port {port} on 127\.0\.0\.1 is in use") as error:
            listen(place, checked(place)[0])
        if holder_of(port) is not None:  # /proc shows it
            assert f"by process {os.getpid()} (" in str(error.value)
    with listen(place, checked(place)[0]) as server:
        assert server.getsockname() == ("127.0.0.1", port)


def test_rank_0_on_another_host_than_its_address():
    place = at("192.0.2.77:29500")  # an address for documentation: nobody's
    with pytest.raises(UserError, match="no address of this host"):
        listen(place, checked(place)[0])


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.1:29500", "localhost", "localhost:1"])
def test_the_address_to_listen_on_can_be_given(bind):
    place = at("192.0.2.77:0", bind=bind)
    with listen(place, preflight.Endpoint("192.0.2.77", 0, "192.0.2.77")) as server:
        assert server.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("bind", "told"),
    [
        ("no-such-host.invalid", "host 'no-such-host.invalid' cannot be resolved"),
        ("no-such-host.invalid:1", "host 'no-such-host.invalid' cannot be resolved"),
        ("localhost:http", "expected HOST:PORT"),
        ("192.0.2.77", r"rank 0 cannot listen on 192\.0\.2\.77:0: expected an address of"),
    ],
)
def test_an_address_to_listen_on_that_cannot_be_names_its_variable(bind, told):
    place = at("127.0.0.1:0", bind=bind)
    with pytest.raises(UserError, match=f"^JAXDP_COORDINATOR_BIND[:=].*{told}"):
        listen(place, preflight.Endpoint("127.0.0.1", 0, "127.0.0.1"))


def test_all_addresses_may_be_listened_on():
    place = at("127.0.0.1:0", bind="0.0.0.0:29500")
    with listen(place, preflight.Endpoint("127.0.0.1", 0, "127.0.0.1")) as server:
        assert server.getsockname()[0] == "0.0.0.0"

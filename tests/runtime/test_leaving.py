"""What an error means in a job, and how a process under a launcher ends that is alone."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import pytest

from jaxdp.errors import Exit, NumericsError, PeerError, UserError
from jaxdp.runtime import gloo, leaving
from jaxdp.runtime.control import read_failure
from jaxdp.runtime.failures import is_of_peer
from jaxdp.runtime.leaving import run_worker

ROOT = Path(__file__).parent.parent.parent

# of Gloo, of JAX's coordination service, of ours
GONE = [
    ValueError(
        "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] "
        "Connection closed by peer [127.0.0.1]:34958"
    ),
    jax.errors.JaxRuntimeError(
        "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] "
        "Read error [10.0.0.2]:35172: Connection reset by peer"
    ),
    jax.errors.JaxRuntimeError(
        "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was "
        "preempted/died/restarted unexpectedly or this task is experiencing network issues."
    ),
    jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: jaxdp/7"),
    PeerError("rank 1 of 2 did not come"),
]


@pytest.mark.parametrize("error", GONE, ids=range(len(GONE)))
def test_a_peer_that_is_gone(error):
    assert is_of_peer(error)
    wrapped = OSError("the checkpoint could not be finished")
    wrapped.__cause__ = error
    assert is_of_peer(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes (3,) and (4,) differ"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes"),
        ConnectionResetError("Connection reset by peer"),  # a web page's, say
        UserError("Gloo is no model"),
        NumericsError("not finite"),
    ],
)
def test_what_is_no_peers_fault(error):
    assert not is_of_peer(error)


@pytest.fixture
def alone(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_on_its_own_ends_as_ever(alone, capsys):
    def fail(place):
        assert place is None
        raise UserError("no such key")

    assert run_worker(lambda place: Exit.SAVED) == Exit.SAVED
    assert run_worker(fail) == Exit.USER
    assert capsys.readouterr().err == "no such key\n"


def test_half_a_place_is_refused(alone, capsys):
    alone.setenv("JAX_PROCESS_ID", "1")
    assert run_worker(lambda place: Exit.DONE) == Exit.USER
    assert "without JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "kind", "message"),
    [
        ("ValueError('a\\nb')", 1, "ValueError", "ValueError: a"),
        ("UserError('no such key')", 2, "UserError", "no such key"),
        ("StorageError('full')", 5, "StorageError", "full"),
        ("KeyboardInterrupt", 130, "signal", "interrupted"),
    ],
)
def test_a_failure_is_left_to_the_launcher(tmp_path, raised, code, kind, message):
    program = f"""
        import sys
        from jaxdp.errors import *
        from jaxdp.runtime.leaving import run_worker
        def program(place):
            raise {raised}
        sys.exit(run_worker(program))
    """
    place = {"JAX_COORDINATOR_ADDRESS": "n:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PYTHONPATH": str(ROOT), "JAXDP_CONTROL": str(tmp_path), **place},
        capture_output=True,
        text=True,
    )
    failure = read_failure(tmp_path, 0)
    assert (ended.returncode, failure.code) == (code, code)
    assert (failure.kind, failure.message, failure.cause) == (kind, message, "own")
    assert ("Traceback" in failure.traceback) == ("Traceback" in ended.stderr) == (code == 1)
    assert "rank" not in ended.stderr  # the launcher marks the lines


def test_an_end_that_takes_too_long_is_told():
    assert leaving._within(5.0, lambda: None) is None
    assert leaving._within(5.0, lambda: [][1]) == "IndexError: list index out of range"
    over = threading.Event()
    assert leaving._within(0.05, lambda: over.wait(60) and None) == "no end within 0.05 s"
    over.set()


@pytest.mark.parametrize(
    ("by_name", "several", "ends"),
    [
        ("127.0.1.1", True, "refused"),
        ("10.0.0.3", True, "told"),
        ("127.0.0.1", False, ""),
    ],
)
def test_a_version_of_jax_that_takes_no_address(monkeypatch, by_name, several, ends):
    from jax._src.lib import _jax

    monkeypatch.setattr(_jax, "make_gloo_tcp_collectives", lambda distributed_client: None)
    monkeypatch.setattr(gloo, "_address_of_name", lambda: by_name)
    lines = []
    if ends == "refused":
        with pytest.raises(UserError, match=r"is 127\.0\.1\.1 to itself"):
            gloo.use_address("10.0.0.2", several, lines.append)
    else:
        gloo.use_address("10.0.0.2" if several else "127.0.0.1", several, lines.append)
    assert len(lines) == (ends == "told")

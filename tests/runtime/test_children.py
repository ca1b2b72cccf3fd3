"""Processes of a job: what they are told, and that every one of them is found again."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdp.errors import UserError
from jaxdp.runtime import reaping
from jaxdp.runtime.children import Child, World, check_count, environment, free_port, shares
from jaxdp.runtime.reaping import Job, end_job, members

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def world(**more):
    given = {"size": 4, "first": 2, "local": 2, "address": "h:1", "bind": "h"}
    return World(**given, control=Path("/c"), attempt=1, **more)


def test_the_environment_of_a_rank():
    stale = {"JAXDP_CORES": "9", "JAXDP_CONTROL": "/old", "HOME": "/home"}
    assert environment(stale, world(cores=((0, 1), (2, 3))), 3, "mark") == {
        "HOME": "/home",
        "JAX_COORDINATOR_ADDRESS": "h:1",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
        "JAXDP_LOCAL_RANK": "1",
        "JAXDP_COORDINATOR_BIND": "h",
        "JAXDP_CONTROL": "/c",
        "JAXDP_ATTEMPT": "1",
        "JAXDP_CORES": "2,3",
        "JAXDP_JOB": "mark",
        "PYTHONUNBUFFERED": "1",
    }


def test_shares_are_disjoint_and_equal(rng):
    for _ in range(20):
        cores = sorted(rng.choice(64, rng.integers(1, 33), replace=False).tolist())
        n = int(rng.integers(1, 9))
        found = shares(cores, n)
        assert len(found) == (n if n <= len(cores) else 0)
        used = [core for share in found for core in share]
        assert len(set(used)) == len(used)
        assert {len(share) for share in found} <= {len(cores) // n}


def test_a_free_port_can_be_bound():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize("nproc", [0, -1, 10_000])
def test_counts_that_are_refused(nproc):
    with pytest.raises(UserError, match=f"--nproc-per-node: {nproc} processes on"):
        check_count(nproc)


@pytest.fixture
def process():
    with subprocess.Popen(SLEEP, start_new_session=True) as found:
        yield found
        found.kill()


def test_a_death_is_seen_without_reaping(process):
    child = Child(0, process)
    assert child.poll() is None
    child.send(signal.SIGKILL)
    while child.poll() is None:
        time.sleep(0.01)
    assert child.code == -signal.SIGKILL
    assert reaping.state(process.pid) == "Z"  # its number is still its own
    child.send(signal.SIGTERM)


def test_who_catches_a_signal():
    code = "import signal; signal.signal(signal.SIGUSR1, print); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        child = Child(0, process)
        assert child.catches(signal.SIGUSR1)
        assert not child.catches(signal.SIGUSR2)
        process.kill()


def test_members_are_found_by_session_and_by_mark(process):
    marked = os.environ | {reaping.MARK: "outer:m1"}
    with subprocess.Popen(SLEEP, start_new_session=True, env=marked) as other:
        both = {process.pid, other.pid}
        job = Job("m1", frozenset({process.pid}))
        deadline = time.monotonic() + 10  # between fork and exec it has no environment of its own
        while set(members(job)) != both and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(members(job)) == both
        assert members(Job("m", frozenset())) == []
        assert members(Job("m1", frozenset({process.pid}), before=0.0)) == [other.pid]
        assert end_job(job) == []
        assert {process.wait(10), other.wait(10)} == {-signal.SIGKILL}


def refuse(*arguments):
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("kind", ["missing", "refused"])
@pytest.mark.parametrize("where", [(os, "pidfd_open"), (signal, "pidfd_send_signal")])
def test_processes_are_killed_where_they_cannot_be_held(kind, where, monkeypatch):
    """Not in every Python, nor in every container: what left our session ends all the same."""
    if kind == "missing":
        monkeypatch.delattr(*where, raising=False)
    else:
        monkeypatch.setattr(*where, refuse, raising=False)
    marked = os.environ | {reaping.MARK: "m3"}
    with subprocess.Popen(SLEEP, start_new_session=True, env=marked) as found:
        deadline = time.monotonic() + 10
        while not members(Job("m3", frozenset())) and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            assert end_job(Job("m3", frozenset())) == []
            assert found.wait(10) == -signal.SIGKILL
        finally:
            found.kill()


def test_the_janitor_acts_when_its_notes_end(process, tmp_path):
    folder = tmp_path / "f"
    (folder / "g").mkdir(parents=True)
    notes = ["mark m2\n", f"session {process.pid}\n", f"folder {folder}\n"]
    reaping.watch_over([*notes, "done\n"])
    reaping.watch_over(["mark m2\n", f"session {process.pid}\n", f"reaped {process.pid}\n"])
    assert process.poll() is None
    assert folder.exists()
    reaping.watch_over(notes)
    assert process.wait(10) == -signal.SIGKILL
    assert not folder.exists()


def test_a_command_tied_to_its_parent_ends_with_it():
    tied = Path(reaping.__file__).with_name("tied.py")
    code = (
        "import os, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, {str(tied)!r}, str(os.getpid()), *sys.argv[1:]])\n"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, *SLEEP], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.5)
        assert reaping.state(pid) not in ("", "Z")
        parent.kill()
        deadline = time.monotonic() + 20
        while reaping.state(pid) not in ("", "Z"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_it_does_not_start_for_a_parent_that_has_died():
    tied = Path(reaping.__file__).with_name("tied.py")
    run = subprocess.run([sys.executable, tied, "1", *SLEEP], check=False, timeout=30)
    assert run.returncode == 128 + signal.SIGKILL

"""Two real processes: joined, compared before step 1, and how each way of leaving ends both."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdp.errors import Exit
from jaxdp.runtime.control import read_failure

WORKER = Path(__file__).with_name("joining_worker.py")


@pytest.fixture
def end_of(start_processes):
    """(what, **environment) -> how both processes ended."""
    return lambda what, **more: start_processes(WORKER, what, **more).wait()


def last_line(text):
    return text.splitlines()[-1]


def test_both_come_to_the_end(end_of, tmp_path):
    for ended in end_of("nothing", JAXDP_CONTROL=str(tmp_path)):
        assert (ended.code, ended.err) == (Exit.DONE, "")
        assert ended.out.startswith("joined at ")  # Gloo's greeting is not in between
    assert not list(tmp_path.iterdir())


def test_asked_to_stop_while_all_leave_nobody_waits(end_of):
    for ended in end_of("asked at its end"):
        assert (ended.code, ended.err) == (Exit.DONE, "")


def test_r5_another_configuration(end_of):
    first, other = end_of("config")
    assert (first.code, first.err) == (Exit.USER, "steps differs: 20 on rank 0; 7 on rank 1\n")
    assert other.code == Exit.USER
    assert "rank 0 tells" in other.err
    assert not first.out  # JAX has not started


def test_r5_another_program(end_of):
    first, other = end_of("program")
    assert first.code == other.code == Exit.USER
    assert first.err.startswith("the programs of a step differ in line ")
    assert "2.000000e+00" in first.err
    assert "3.000000e+00" in first.err


def test_r6_another_leaf(end_of):
    first, other = end_of("leaf")
    assert first.code == other.code == Exit.USER
    told = "params/second float32[3] on rank 0; params/second float64[3] on rank 1\n"
    assert first.err.startswith("the leaves of the state differ in line ")
    assert first.err.endswith(told)


def test_a_mistake_of_all_is_told_once(end_of):
    first, other = end_of("mistake")
    assert (first.code, first.err) == (Exit.USER, "no such key\n")
    assert (other.code, other.err.count("no such key")) == (Exit.USER, 0)


def test_a_mistake_of_one_rank_is_known_to_the_other(end_of):
    first, other = end_of("mistake of rank 1")
    assert first.code == other.code == Exit.USER
    assert "(" in first.err
    assert first.err.endswith("): no such file\n")


@pytest.mark.parametrize("when", ["raise", "compiling"])
def test_p4_an_exception_ends_the_other_at_once(end_of, tmp_path, when):
    first, failed = end_of(when, JAXDP_CONTROL=str(tmp_path))
    assert failed.code == Exit.BUG
    assert "ValueError: a bug" in failed.err
    assert first.code == Exit.PEER
    own, peers = read_failure(tmp_path, 1), read_failure(tmp_path, 0)
    assert (own.cause, own.kind, own.message) == ("own", "ValueError", "ValueError: a bug")
    assert "Traceback" in own.traceback
    assert (peers.cause, peers.code, peers.traceback) == ("peer", Exit.PEER, "")
    assert peers.message.startswith("rank 1 on ")
    assert peers.message.endswith("left with code 1: ValueError: a bug")
    assert 0 <= peers.time - own.time < 20  # and not the minute that it would have slept


def test_a_killed_process_is_named(end_of):
    first, killed = end_of("kill")
    assert (first.code, killed.code) == (Exit.PEER, -9)
    assert "rank 1 on " in last_line(first.err)
    assert "died without a word" in last_line(first.err)


def test_what_all_find_is_said_by_all(end_of):
    for rank, ended in enumerate(end_of("all")):
        assert ended.code == Exit.NUMERICS
        assert ended.err.endswith(f"rank {rank}: not finite at step 20\n")


# a host whose name stands for an address that others reach
NAMESPACE = """
set -e
hostname jaxdp-test
ip link set lo up
ip address add 10.77.0.1/32 dev lo
(cat /etc/hosts; echo 10.77.0.1 jaxdp-test) > "$1/hosts"
mount --bind "$1/hosts" /etc/hosts
test "$(getent ahostsv4 jaxdp-test | head -n 1 | cut -d ' ' -f 1)" = 10.77.0.1
shift
exec "$@"
"""


def test_p10_one_host_listens_on_loopback_only(start_processes, tmp_path):
    enter = ["unshare", "--uts", "--net", "--mount", "sh", "-c", NAMESPACE, "sh", str(tmp_path)]
    if (
        not shutil.which("unshare")
        or subprocess.run([*enter, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs the right to make namespaces (root), unshare and ip")
    program = (
        "import os, subprocess, sys\n"
        "children = [subprocess.Popen(sys.argv[1:], env=os.environ | {'JAX_PROCESS_ID': r})\n"
        "            for r in '01']\n"
        "sys.exit(max(child.wait() for child in children))\n"
    )
    place = {"JAX_COORDINATOR_ADDRESS": "localhost:29511", "JAX_NUM_PROCESSES": "2"}
    job = [sys.executable, "-c", program, sys.executable, str(WORKER), "listen"]
    running = start_processes("-c", START, *enter, *job, n=1, **place)
    (ended,) = running.wait()
    assert ended.code == 0, ended.err
    lines = [line for line in ended.out.splitlines() if line.startswith("listening ")]
    found = {address for line in lines for address in line.split()[1:]}
    assert len(found) >= 3  # the coordinator's, and a Gloo's of each process
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    assert all(address.partition(":")[0] in loopback for address in found), found


START = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"

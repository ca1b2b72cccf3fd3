"""The processes of a comparison: started, and ended with it, by whatever signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxdp

ROOT = Path(jaxdp.__file__).parent.parent
# as the program is, but without JAX; the worker leaves its process id
PROGRAM = """
import sys
from jaxdp.comparison.processes import run_processes
from jaxdp.errors import exit_code
sys.exit(exit_code(lambda: run_processes("stand_in", sys.argv[1:], 2)))
"""
WORKER = """
import os, sys, time
from jaxdp.comparison.processes import rank
from pathlib import Path
Path(sys.argv[1], str(rank())).write_text(str(os.getpid()))
print(f"{rank()} is here", flush=True)
if sys.argv[2] == "fail" and rank() == 1:
    sys.exit("1 has failed")
time.sleep(60 if sys.argv[2] != "done" else 0)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "stand_in.py").write_text(WORKER)
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    started = []

    def start(word):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), word]
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdout=-1, stderr=-1, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def is_gone(tmp_path, rank):
    return not Path("/proc", (tmp_path / str(rank)).read_text()).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_with_its_own_code(start, tmp_path, number):
    process = start("wait")
    deadline = time.monotonic() + 60
    while not all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == f"{number.name}: ended\n"
    assert is_gone(tmp_path, 0)
    assert is_gone(tmp_path, 1)


def test_a_failure_of_one_is_shown_and_ends_all(start, tmp_path):
    process = start("fail")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "process 1:\n1 has failed\n"
    assert "1 is here" not in out
    assert is_gone(tmp_path, 0)


def test_the_first_process_has_the_terminal(start):
    process = start("done")
    assert process.communicate(timeout=60) == ("0 is here\n", "")
    assert process.returncode == 0

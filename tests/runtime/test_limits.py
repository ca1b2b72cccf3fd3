"""A launcher that may start no more: told in one line, and what was started is gone."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdp

ROOT = Path(jaxdp.__file__).parent.parent
SLEEPER = "import time; time.sleep(600)"
# as if this process had come to a limit of its container
FEW_THREADS = """
import sys, threading
from jaxdp import launch

start, begun = threading.Thread.start, []

def start_or_refuse(thread):
    if len(begun) == {most}:
        raise RuntimeError("can't start new thread")
    begun.append(thread)
    start(thread)

threading.Thread.start = start_or_refuse
sys.exit(launch.main(sys.argv[1:]))
"""


def launched(command, folder):
    (folder / "sleeper.py").write_text(SLEEPER)
    given = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    arguments = ("--nproc", "16", "--pin", "off", "--log-dir", folder / "logs", "-m", "sleeper")
    return subprocess.run(
        [*command, *arguments],
        env=given, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def left(folder):
    """Ranks that are still there, by what they were told."""
    told = os.fsencode(f"JAXDP_CONTROL={folder}")
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if told in path.read_bytes():
                found.append(path)
    return found


def check(ended, folder, limit):
    lines = ended.stderr.splitlines()
    assert (ended.returncode, len(lines)) == (2, 1), ended.stderr
    assert "cannot be started: too many" in lines[0]
    assert limit in lines[0]
    assert not left(folder)
    assert [path.name for path in (folder / "logs").iterdir()] == ["attempt-0"]  # no restart


@pytest.mark.parametrize("most", [1, 2, 5])
def test_too_many_threads(most, tmp_path):
    """One of them is the launcher's own; with an even number a rank has the first of its two."""
    ended = launched([sys.executable, "-c", FEW_THREADS.format(most=most)], tmp_path)
    check(ended, tmp_path, "ulimit -u, or the pids limit of the container")


@pytest.mark.parametrize("most", range(20, 24))
def test_too_many_open_files(most, tmp_path):
    """Wherever in a start the last one is taken."""
    shell = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh"]
    ended = launched([*shell, sys.executable, "-m", "jaxdp.launch"], tmp_path)
    check(ended, tmp_path, "open files (ulimit -n)")

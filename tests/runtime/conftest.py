"""A launcher in a process of its own, and what must be left of it: nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxdp

HERE = Path(__file__).parent
ROOT = Path(jaxdp.__file__).parent.parent
PATIENCE_S = 60


class Launched:
    """A running `python -m jaxdp.launch`."""

    def __init__(self, folder, options, steps, faults, **more):
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        path = os.pathsep.join((str(ROOT), str(HERE)))
        given = os.environ | {"PYTHONPATH": path, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxdp.launch", *map(str, options), "-m", "launched_worker",
             str(folder), str(steps), *faults],
            env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
        )  # fmt: skip

    def pids(self):
        """(pid, rank, attempt) of all that was started; 0 is a worker's sign that it is ready."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "pids").read_text().splitlines()
            return [tuple(map(int, line.split())) for line in lines]
        return []

    def wait_for(self, count):
        """Waits until so many processes, or signs, are there."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.pids()) < count:
            assert time.monotonic() < deadline, self.pids()
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)

    def end(self, *signals):
        """Sends signals, waits; returns the exit code and both outputs."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.2 if len(signals) > 1 else 0)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def left(self, within_s=5.0):
        """What is still there after a while: processes, temporary files."""
        deadline = time.monotonic() + within_s
        while True:
            found = [pid for pid, *_ in self.pids() if pid and lives(pid)]
            found += list(self.temporary.iterdir())
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def kill(self):
        """Whatever the test found: nothing stays."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate()
        for pid in {pid for pid, *_ in self.pids()} - {0}:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


def lives(pid):
    """Whether there is such a process, dead ones that nobody reaped apart."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def launch(tmp_path):
    """(options, steps, *faults) -> a launcher of workers that beat, and do what they are told."""
    with contextlib.ExitStack() as stack:

        def start(options, steps, *faults, **more):
            found = Launched(tmp_path, options, steps, faults, **more)
            stack.callback(found.kill)
            return found

        yield start

"""The launcher with workers that misbehave: each fault is survived or told, and nothing is left."""

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
FAST = ("--nproc", 2, "--pin", "off")
NOTE = "without effect unless launched_worker sends heartbeats, as jaxdp.train does"


class Launched:
    """A running `python -m jaxdp.launch`."""

    def __init__(self, folder, options, steps, faults):
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        path = os.pathsep.join((str(ROOT), str(HERE)))
        given = os.environ | {"PYTHONPATH": path, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxdp.launch", *map(str, options), "-m", "launched_worker",
             str(folder), str(steps), *faults],
            env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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

        def start(options, steps, *faults, folder=tmp_path):
            found = Launched(folder, options, steps, faults)
            stack.callback(found.kill)
            return found

        yield start


def attempts(job):
    return 1 + max(attempt for _, _, attempt in job.pids())


def test_it_runs_to_its_end(launch):
    job = launch(FAST, 3)
    code, out, err = job.end()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{r}] step {s}" for r in range(2) for s in (1, 2, 3)]
    assert attempts(job) == 1
    assert not job.left()


@pytest.mark.parametrize("rank", [0, 1])
def test_p3_a_killed_rank_is_told_and_all_are_restarted(launch, rank):
    job = launch(FAST, 4, f"{rank}:2:kill")
    code, _, err = job.end()
    assert code == 0
    lines = err.splitlines()
    assert lines[0].startswith(f"rank {rank} was killed by SIGKILL")
    assert lines[0].endswith("in phase step at step 2")
    assert "launch: restart 1 (2 of 3 left)" in lines
    assert attempts(job) == 2
    assert not job.left()


def test_p3_all_are_gone_within_a_second_of_a_death(launch):
    job = launch((*FAST, "--max-restarts", 0), 1000, "*:1:children", "0:1:deaf")
    job.wait_for(9)
    [victim] = [pid for pid, rank, _ in job.pids()[:9] if rank == 1][:1]
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    code, _, err = job.end()
    # 0.4 s for the others to say what they lost; the machine may be busy
    assert time.monotonic() - begun < 10
    assert code == 128 + signal.SIGKILL
    assert err.splitlines()[-1] == "launch: given up: --max-restarts is 0"
    assert not job.left()


@pytest.mark.parametrize("how", ["fail", "raise"])
def test_p4_the_first_failure_is_shown_first_and_alone(launch, how):
    job = launch((*FAST, "--max-restarts", 0), 1000, f"1:3:{how}")
    code, _, err = job.end()
    lines = err.splitlines()
    assert code == 1
    if how == "fail":
        assert lines[0] == "rank 1 failed in phase step at step 3: ValueError: record 3 is bad"
    else:
        assert lines[0] == "rank 1 ended with code 1 in phase step at step 3"
    assert lines[1] == "Traceback (most recent call last):"
    assert err.count("Traceback") == 1
    assert not job.left()


def test_p4_with_a_log_folder_nothing_is_lost(launch, tmp_path):
    logs = tmp_path / "logs"
    (logs / "attempt-0").mkdir(parents=True)  # of an earlier launch
    job = launch((*FAST, "--max-restarts", 0, "--log-dir", logs), 1000, "1:3:fail")
    code, _, err = job.end()
    assert code == 1
    assert f"launch: all that the ranks wrote is in {logs / 'attempt-1'}" in err.splitlines()
    text = (logs / "attempt-1" / "rank-1.log").read_text()
    assert text.startswith("step 1\nstep 2\nTraceback")
    assert (logs / "attempt-1" / "rank-0.log").read_text().startswith("step 1\n")
    assert not list((logs / "attempt-0").iterdir())


def test_a_restart_goes_on_without_its_log_folder(launch, tmp_path):
    """Which a file took the place of, as good as a full disk: the workers fail of it too."""
    logs = tmp_path / "logs"
    job = launch((*FAST, "--log-dir", logs), 10_000)
    job.wait_for(2)
    logs.rename(tmp_path / "gone")
    logs.write_text("")
    job.wait_for(4)
    code, _, err = job.end(signal.SIGTERM)
    assert code == 75
    told = f"launch: --log-dir: {logs} cannot be used: File exists; nothing is kept of this attempt"
    assert err.splitlines().count(told) == 1
    assert not job.left()


@pytest.mark.parametrize(
    ("code", "restarts"), [(1, 1), (6, 1), (7, 1), (2, 0), (3, 0), (4, 0), (5, 0), (75, 0)]
)
def test_which_codes_are_restarted(launch, code, restarts):
    job = launch(("--nproc", 1), 2, f"0:1:{code}")
    found, _, _ = job.end()
    assert found == (0 if restarts else code)
    assert attempts(job) == 1 + restarts


@pytest.mark.parametrize("how", ["hang", "stop"])
def test_p5_a_stuck_rank_is_told_with_its_stack(launch, how):
    job = launch((*FAST, "--step-deadline", 1.5), 4, f"1:3:{how}")
    code, _, err = job.end()
    assert code == 0
    note, *lines = err.splitlines()
    assert note == f"launch: --step-deadline: {NOTE}"
    assert lines[0].startswith("rank 1 is stuck in phase step at step 3: no heartbeat for ")
    assert ("stopped by a signal" in lines[0]) == (how == "stop")
    if how == "hang":
        assert lines[1] == "rank 1, main thread, most recent call first:"
        assert "launched_worker.py" in lines[2]
        assert lines[2].endswith("in act")
    assert "launch: restart 1 (2 of 3 left)" in lines
    assert not job.left()


def test_p6_a_rank_that_ignores_sigterm_is_killed_after_the_grace(launch):
    job = launch((*FAST, "--grace", 0.5), 10_000, "1:1:deaf")
    job.wait_for(3)
    code, _, err = job.end(signal.SIGTERM)
    assert code == 75  # rank 0 saved
    assert err == "launch: SIGTERM: all ranks are asked to save and end within 0.5 s\n"
    assert not job.left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_p7_a_request_to_the_launcher(launch, number):
    job = launch(FAST, 10_000, "1:1:children")
    job.wait_for(5)
    code, _, err = job.end(number)
    assert code == 75
    assert err == f"launch: {number.name}: all ranks are asked to save and end within 30 s\n"
    assert attempts(job) == 1
    assert not job.left()


def test_p7_a_second_interrupt_ends_all_at_once(launch):
    job = launch((*FAST, "--grace", 500), 10_000, "*:1:deaf")
    job.wait_for(4)
    code, _, _ = job.end(signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert not job.left()


def test_p7_a_killed_launcher_leaves_nothing(launch):
    job = launch(FAST, 10_000, "1:1:children", "0:1:stop")
    job.wait_for(5)
    code, _, _ = job.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not job.left()


def test_p7_children_of_a_worker_that_is_done_are_ended(launch):
    job = launch(FAST, 2, "*:1:children")
    code, _, _ = job.end()
    assert code == 0
    assert len(job.pids()) == 8
    assert not job.left()


@pytest.mark.parametrize("word", ["term", "int"])
def test_a_request_to_one_rank_is_one_to_the_job(launch, word):
    """It saves and says 75; the others, here, know nothing of it."""
    job = launch((*FAST, "--grace", 0.5), 10_000, f"1:2:{word}")
    code, _, _ = job.end()
    assert code == 75
    assert attempts(job) == 1
    assert not job.left()


def test_a_request_between_two_attempts(launch):
    job = launch(("--nproc", 1), 9, "sick")
    told = [job.process.stderr.readline() for _ in range(6)]
    assert told[-1] == "launch: restart 3 in 2 s (0 of 3 left)\n"
    code, _, err = job.end(signal.SIGTERM)
    assert (code, err) == (143, "launch: SIGTERM: not restarted\n")
    assert attempts(job) == 3
    assert not job.left()


def test_p8_slow_but_alive_is_left_alone(launch):
    """A save of 2.5 s, longer than a step may take."""
    job = launch((*FAST, "--step-deadline", 2, "--save-deadline", 30), 5, "0:3:nap", "1:3:nap")
    code, _, err = job.end()
    assert (code, err) == (0, f"launch: --step-deadline, --save-deadline: {NOTE}\n")


def test_p9_a_step_that_fails_each_time_ends_the_job(launch):
    job = launch((*FAST, "--max-restarts", 50), 9, "!1:2:exit")
    code, _, err = job.end()
    assert code == 1
    assert err.splitlines()[-1] == "launch: given up: it failed 3 times in a row at step 2"
    assert attempts(job) == 3


def test_fewer_processes_when_they_do_not_get_going(launch):
    """Rank 3 fails at once, 3 processes are refused by the worker, 2 are enough."""
    job = launch(("--nproc", 4, "--min-nproc", 1), 3, "!3:1:exit", "even")
    code, _, err = job.end()
    assert code == 0
    told = [line for line in err.splitlines() if "restart" in line]
    assert told[0] == "launch: restart 1 (2 of 3 left)"
    assert told[1].startswith("launch: restart 2 with 3 processes")
    assert told[2].startswith("launch: restart 3 with 2 processes")
    assert "3 does not divide 4" in err.splitlines()


def test_nobody_waits_for_a_slow_reader(launch):
    """Nobody reads our output: the workers end all the same, and the launcher after them."""
    job = launch(FAST, 2, "*:1:talk")
    deadline = time.monotonic() + 50
    job.wait_for(2)
    while any(Path(f"/proc/{pid}").exists() for pid, *_ in job.pids()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, out, err = job.end()
    assert code == 0
    lines = out.splitlines()
    assert all(line.startswith(("[0] ", "[1] ")) for line in lines)
    assert "[1] step 2" in lines or "the reader of this output is too slow" in err


def test_a_reader_that_left_ends_the_job(launch):
    job = launch((*FAST, "--grace", 20), 10_000)
    job.wait_for(2)
    job.process.stdout.close()
    assert job.process.wait(60) == 75
    assert not job.left()


def test_two_hosts_have_one_launcher_each(launch, tmp_path):
    """Here both are this machine; each starts its own ranks."""
    where = ("--nproc", 2, "--nnodes", 2, "--coordinator", "127.0.0.1:29999", "--node-rank")
    for node in (0, 1):
        (tmp_path / str(node)).mkdir()
    jobs = [launch((*where, node), 2, folder=tmp_path / str(node)) for node in (0, 1)]
    (code, out, err), (code1, out1, err1) = (job.end() for job in jobs)
    assert (code, code1) == (0, 0)
    assert {line[:3] for line in out.splitlines()} == {"[0]", "[1]"}
    assert {line[:3] for line in out1.splitlines()} == {"[2]", "[3]"}
    assert err.startswith("launch: warning: the coordinator 127.0.0.1:29999 is each host itself")
    assert (len(err.splitlines()), err1) == (1, err)


def test_the_launcher_imports_no_jax():
    """Nor anything else that is slow to import: it must be there at once."""
    code = (
        "import sys, jaxdp.launch; "
        "sys.exit(bool({'jax', 'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

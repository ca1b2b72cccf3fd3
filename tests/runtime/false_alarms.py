"""A job that is slow and disturbed, but healthy: is it left alone?

    python tests/runtime/false_alarms.py [--minutes 30] [--nproc 4] [--deadline SECONDS] [--seed S]

Trains for so long under the launcher's default deadlines, or shorter ones, while other processes
keep the machine's cores busy, a random rank is stopped for 3 seconds (SIGSTOP) about every half
minute, and each evaluation and each save takes every rank 5 seconds more.  A line a minute; at the
end the job is asked to end.  It has to save, may not have been restarted, and leaves no process and
no temporary file.  Exit code 3 if not.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from fault_trial import attempts, environment_of, kill_marked, marked, new_mark, start_job

from jaxdp.errors import Exit
from jaxdp.runtime.control import read_heartbeat
from jaxdp.runtime.phases import EVALUATION, SAVE, STEP

STOPPED_S, BETWEEN_STOPS_S, SLOW_S = 3.0, 30.0, 5.0
TRAIN = [
    "--model.hidden", "[16]", "--global_batch", "48", "--steps", "100000000", "--log.every", "50",
    "--eval.every", "1000", "--checkpoint.every", "2000", "--log.progress", "plain",
]  # fmt: skip
BUSY = "while True: pass"


class Job:
    """The job, what it wrote, and what was done to it."""

    def __init__(self, home: Path, nproc: int, deadline_s: float | None):
        """Starts it; `deadline_s` of a step, an evaluation and a save, None: the launcher's own."""
        self.log, self.output, self.tmp = home / "log", home / "output.txt", home / "tmp"
        self.tmp.mkdir()
        self.mark, self.stops = new_mark(), 0
        faults = f"*:*:evaluation:slow:{SLOW_S},*:*:save:slow:{SLOW_S}"
        phases = (STEP, EVALUATION, SAVE) if deadline_s else ()
        command = [
            sys.executable, "-m", "jaxdp.launch", "--nproc", str(nproc), "--log-dir", str(self.log),
            *(word for phase in phases for word in (f"--{phase}-deadline", str(deadline_s))),
            "-m", "jaxdp.train", *TRAIN, "--devices", str(nproc), "--out", str(home / "run"),
        ]  # fmt: skip
        given = {"JAXDP_FAULTS": faults, "TMPDIR": str(self.tmp)}
        with open(self.output, "wb") as output:
            self.launcher = start_job(command, self.mark, given, output)

    def ranks(self) -> dict[int, int]:
        """rank -> pid."""
        found = {}
        for pid in marked(self.mark):
            given = environment_of(pid)
            if "JAX_PROCESS_ID" in given and "JAXDP_CONTROL" in given:
                found[int(given["JAX_PROCESS_ID"])] = pid
        return found

    def step(self) -> int:
        """That rank 0 was seen at last."""
        found = attempts(self.log)
        beat = read_heartbeat(found[-1], 0) if found else None
        return 0 if beat is None else beat.step

    def restarts(self) -> int:
        return max(0, len(attempts(self.log)) - 1)

    def stop_one(self, rng: np.random.Generator) -> None:
        """Stops a random rank for a while."""
        if not (ranks := self.ranks()):
            return
        pid = ranks[int(rng.choice(sorted(ranks)))]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            self.stops += 1

    def lines(self, word: str) -> int:
        """How many lines it wrote with this word in them."""
        return sum(word in line for line in self.output.read_text().splitlines())

    def end(self) -> tuple[int, int]:
        """Asks it to end; its exit code, and how many processes and temporary files it left."""
        self.launcher.send_signal(signal.SIGTERM)
        try:
            code = self.launcher.wait(120)
            time.sleep(2)  # for what is on its way out
            return code, len(marked(self.mark)) + len(list(self.tmp.iterdir()))
        finally:
            kill_marked(self.mark)


def disturb(job: Job, minutes: float, rng: np.random.Generator) -> None:
    """Until the time is over, or the job has ended by itself; a line a minute."""
    began = told = time.monotonic()
    next_stop = began + BETWEEN_STOPS_S
    while time.monotonic() < began + 60 * minutes and job.launcher.poll() is None:
        time.sleep(1)
        if time.monotonic() > next_stop:
            job.stop_one(rng)
            next_stop = time.monotonic() + rng.uniform(0.5, 1.5) * BETWEEN_STOPS_S
        if time.monotonic() > told + 60:
            told += 60
            print(
                f"{(told - began) / 60:3.0f} min: step {job.step()}, {job.stops} stops, "
                f"{job.restarts()} restarts",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--deadline", type=float, help="seconds of a step, evaluation and save")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jaxdp-alarms-") as folder:
        job = Job(Path(folder), args.nproc, args.deadline)
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
        try:
            disturb(job, args.minutes, np.random.default_rng(args.seed))
            step, restarts, by_itself = job.step(), job.restarts(), job.launcher.poll()
        finally:
            for process in busy:
                process.kill()
                process.wait()
            code, left = job.end()
        print(
            f"{args.minutes:g} minutes, {args.nproc} ranks, {step} steps, {job.stops} stops of "
            f"{STOPPED_S:g} s: {restarts} restarts, {job.lines('straggler: ')} lines about "
            f"stragglers, exit code {code}, {left} left behind"
        )
        if restarts or by_itself is not None or code != Exit.SAVED or left:
            print(job.output.read_text()[-4000:])
            return Exit.FAULT_FOUND
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())

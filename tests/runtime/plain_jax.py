"""The same faults to a job of ours and to one on plain `jax.distributed`: when is it over?

    python tests/runtime/plain_jax.py [--limit 330] [--jobs 4] [--deadline 10]

Two processes, a fault at one of them in the middle of training.  Of plain JAX: the time until both
are gone, with what codes; it has no launcher, so that nothing begins anew.  Of ours, one job at a
time: that time, and until the restarted job has made a new step, with a compilation cache.
Exit code 3 if a job of ours did not come through.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import fault_matrix
from fault_trial import Case, kill_marked, new_mark, start_job

from jaxdp.errors import Exit
from jaxdp.runtime.children import free_port
from jaxdp.runtime.phases import STEP

ACTIONS = ("kill", "raise", "exit", "stop", "hang", "term")
AT, START_S = 8, 120.0
WORKER = Path(__file__).with_name("plain_jax_worker.py")


class Plain(NamedTuple):
    """How plain JAX took a fault: seconds to the end of both, None within the limit; in words."""

    gone_s: float | None
    words: str


def plain(case: Case, folder: Path, limit_s: float) -> Plain:
    """Two processes of plain JAX, one of which has the fault."""
    folder.mkdir(parents=True)
    address, mark, processes = f"127.0.0.1:{free_port()}", new_mark(), []
    for rank in (0, 1):
        command = [sys.executable, str(WORKER), address, str(rank), str(folder)]
        with open(folder / f"rank-{rank}.txt", "wb") as output:
            processes.append(start_job(command, mark, {"JAXDP_FAULTS": case.faults()}, output))
    try:
        fault = _wait_for_fault(folder, processes)
        while (
            left := [p for p in processes if p.poll() is None]
        ) and time.time() - fault < limit_s:
            time.sleep(0.02)
        gone_s = None if left else time.time() - fault
        steps = [_step(folder, rank) for rank in (0, 1)]
    finally:
        kill_marked(mark)
        codes = [process.wait() for process in processes]
    if gone_s is not None:
        return Plain(gone_s, f"codes {codes[0]}, {codes[1]}")
    words = f"{len(left)} of 2 still there"
    return Plain(None, words + ("; training goes on" if min(steps) > AT + 20 else ""))


def _wait_for_fault(folder: Path, processes: list[subprocess.Popen]) -> float:
    """When it happened, by `time.time()`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for marker in (folder / ".faults").glob("*"):
            return marker.stat().st_mtime
        if any(process.poll() is not None for process in processes):
            break
        time.sleep(0.01)
    sys.exit(f"the fault did not come; see {folder}")


def _step(folder: Path, rank: int) -> int:
    text = (folder / f"step-{rank}").read_text()
    return int(text) if text else 0


def _told(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--limit", type=float, default=330.0, help="seconds that plain JAX is given"
    )
    parser.add_argument(
        "--jobs", type=int, default=4, help="of plain JAX at a time: most only wait"
    )
    parser.add_argument("--deadline", type=float, default=10.0, help="of our phases, in seconds")
    args = parser.parse_args()
    args.nproc, args.start_deadline = 2, 4 * args.deadline
    home = Path(tempfile.mkdtemp(prefix="jaxdp-plain-"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(home / "cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    cases = [Case(action, STEP, rank, AT) for action, rank in product(ACTIONS, (0, 1))]
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = [home / f"plain-{i}" for i in range(len(cases))]
        theirs = list(pool.map(lambda c, f: plain(c, f, args.limit), cases, folders))
    wanted = fault_matrix.undisturbed(home / "undisturbed", args)
    heads = ("fault", "plain JAX: gone, s", "", "ours: gone, s", "new step, s")
    print("{:24} {:>20}  {:32} {:>14} {:>12}".format(*heads))
    wrong = 0
    for i, (case, their) in enumerate(zip(cases, theirs, strict=True)):
        ours = fault_matrix.run_case(case, home / f"ours-{i}", args, wanted)
        wrong += ours.why is not None
        gone = f"> {args.limit:g}" if their.gone_s is None else _told(their.gone_s)
        print(
            f"{case!s:24} {gone:>20}  {their.words:32} {_told(ours.gone_s):>14} "
            f"{_told(ours.next_step_s):>12}  {ours.why or 'same bits at the end'}",
            flush=True,
        )
    return Exit.FAULT_FOUND if wrong else Exit.DONE


if __name__ == "__main__":
    sys.exit(main())

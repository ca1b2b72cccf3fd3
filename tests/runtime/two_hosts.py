"""A job on two hosts, which are namespaces of this machine: see `namespaces.py`.  Needs root.

    python tests/runtime/two_hosts.py [--only WORD] [--keep FOLDER]

    trains    a launcher on each host: is the end that of the same job on one host, to the bit?
    cut       the link goes down for good: when is everything gone, and what is said?
    mended    it goes down and comes back: does the job come to the same end?

On each host its own name stands for loopback.  After each: no process is left.  Exit code 3 if
something was not as it should.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fault_trial import attempts, kill_marked, marked, new_mark, result, start_job
from namespaces import Host, available, two_hosts

from jaxdp.errors import Exit
from jaxdp.runtime.control import read_heartbeat

PORT, STEPS, PACE_S = 29500, 60, 0.05
JOIN_S = 30  # how long ranks wait for each other
SILENT_S = 20.0  # after which a link is given up: `jaxdp/runtime/lifeline.py`
CUT_AT, CUT_S = 20, 30.0
LIMIT_S = 240.0
TRAIN = [
    "--devices", "2", "--model.hidden", "[16]", "--global_batch", "48", "--steps", str(STEPS),
    "--optimizer.warmup_steps", "0", "--log.every", "1", "--log.progress", "plain",
    "--eval.every", "10", "--checkpoint.every", "10",
]  # fmt: skip


class Job:
    """Launchers, one on each host or the one of a job on one host."""

    def __init__(self, folder: Path, hosts: Sequence[Host], options: Sequence[str] = ()):
        """Starts them; what they write is below `folder`."""
        self.out, self.mark, self.folder = folder / "run", new_mark(), folder
        self.launchers = []
        given = {
            "JAXDP_FAULTS": f"*:*:step:slow:{PACE_S}", "JAXDP_JOIN_TIMEOUT": str(JOIN_S),
            "TMPDIR": str(folder / "tmp"),
        }  # fmt: skip
        (folder / "tmp").mkdir(parents=True)
        for node, host in enumerate(hosts or [None]):
            words = ["--nproc", "1" if host else "2", "--log-dir", str(self.log(node)), *options]
            if host:
                words += ["--nnodes", "2", "--node-rank", str(node)]
                words += ["--coordinator", f"{hosts[0].ip}:{PORT}"]
            command = [sys.executable, "-m", "jaxdp.launch", *words, "-m", "jaxdp.train", *TRAIN]
            command += ["--out", str(self.out)]
            command = host.command(command) if host else command
            with open(self.text_file(node), "wb") as output:
                self.launchers.append(start_job(command, self.mark, given, output))

    def log(self, node: int) -> Path:
        return self.folder / f"log-{node}"

    def text_file(self, node: int) -> Path:
        return self.folder / f"launcher-{node}.txt"

    def wait_for_step(self, step: int) -> None:
        """Until rank 0 is there, or a launcher has ended."""
        self._wait(lambda: self._step() >= step or None not in self.codes())

    def _step(self) -> int:
        found = attempts(self.log(0))
        beat = read_heartbeat(found[-1], 0) if found else None
        return 0 if beat is None else beat.step

    def wait_for_ranks_gone(self) -> float:
        """Until only launchers and what they keep beside them are left of a first attempt."""
        began = time.monotonic()
        first = {pid for pid in marked(self.mark) if _is_rank(pid)}
        self._wait(lambda: not first & set(marked(self.mark)))
        return time.monotonic() - began

    def wait(self) -> float:
        """Until all launchers have ended."""
        began = time.monotonic()
        self._wait(lambda: None not in self.codes())
        return time.monotonic() - began

    def codes(self) -> list[int | None]:
        return [launcher.poll() for launcher in self.launchers]

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                sys.exit(f"not over after {LIMIT_S:g} s; see {self.folder}")
            time.sleep(0.02)

    def left(self) -> int:
        """How many of its processes are there, after a moment for those on their way out."""
        deadline = time.monotonic() + 5
        while (found := len(marked(self.mark))) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def show(self) -> None:
        """What the launchers said of themselves, and what was told first."""
        for node in range(len(self.launchers)):
            for line in self.text_file(node).read_text().splitlines():
                if not line.startswith("["):  # what a rank wrote while all was well
                    print(f"    node {node}: {line}", flush=True)


def _is_rank(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"jaxdp.train" in words and b"jaxdp.launch" not in words


@contextmanager
def job(folder: Path, hosts: Sequence[Host] = (), options: Sequence[str] = ()) -> Iterator[Job]:
    started = Job(folder, hosts, options)
    try:
        yield started
    finally:
        kill_marked(started.mark)


def trains(hosts: Sequence[Host], home: Path, wanted: dict) -> str | None:
    with job(home / "trains", hosts) as found:
        seconds = found.wait()
        left, codes = found.left(), found.codes()
        print(f"trains: codes {codes} after {seconds:.1f} s, {left} processes left")
        return _wrong(codes == [0, 0] and not left and result(found.out) == wanted)


def cut(hosts: Sequence[Host], home: Path, wanted: dict) -> str | None:
    with job(home / "cut", hosts, ["--max-restarts", "1"]) as found:
        found.wait_for_step(CUT_AT)
        hosts[1].link("down")
        gone, ended = found.wait_for_ranks_gone(), found.wait()
        hosts[1].link("up")
        left, codes = found.left(), found.codes()
        print(
            f"cut: the ranks were gone after {gone:.1f} s, the launchers {ended:.1f} s later "
            f"(a restart, whose ranks wait for {JOIN_S:g} s), codes {codes}, {left} processes left"
        )
        found.show()
        told = [found.text_file(node).read_text() for node in (0, 1)]
        clear = all("is lost: it died without a word, or its link is down" in text for text in told)
        in_time = gone < SILENT_S + 2 and ended < 2 * JOIN_S
        return _wrong(codes == [Exit.PEER] * 2 and not left and clear and in_time)


def mended(hosts: Sequence[Host], home: Path, wanted: dict) -> str | None:
    with job(home / "mended", hosts) as found:
        found.wait_for_step(CUT_AT)
        hosts[1].link("down")
        time.sleep(CUT_S)
        hosts[1].link("up")
        seconds = found.wait()
        left, codes = found.left(), found.codes()
        restarts = len(attempts(found.log(0))) - 1
        print(
            f"mended: down for {CUT_S:g} s; codes {codes} {seconds:.1f} s after it was back, "
            f"{restarts} restarts, {left} processes left"
        )
        found.show()
        return _wrong(codes == [0, 0] and not left and restarts > 0 and result(found.out) == wanted)


def _wrong(well: bool) -> str | None:
    return None if well else "not as it should be"


CASES = {"trains": trains, "cut": cut, "mended": mended}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help=f"of {', '.join(CASES)}")
    parser.add_argument("--keep", type=Path, help="where everything that was written stays")
    args = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if args.only in name}
    if not chosen or not available():
        parser.error("needs root, namespaces, and one of the cases")
    home = args.keep or Path(tempfile.mkdtemp(prefix="jaxdp-two-hosts-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(home / "cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    with job(home / "one-host") as found:
        found.wait()
        wanted = result(found.out)
    with two_hosts() as hosts:
        wrong = {name: why for name, case in chosen.items() if (why := case(hosts, home, wanted))}
    for name, why in wrong.items():
        print(f"{name}: {why}; see {home}")
    if wrong or not wanted:
        return Exit.FAULT_FOUND
    if args.keep is None:
        shutil.rmtree(home)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())

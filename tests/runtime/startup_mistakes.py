"""What each mistake at the start of a job of two processes prints, and after how many seconds.

    python tests/runtime/startup_mistakes.py [--other-python PATH]

Seconds are from the start of Python to its end, its import of JAX included where it comes that far.
`--other-python`: an interpreter with another version of JAX, for the mistake of mixing them.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
WORKER = str(Path(__file__).with_name("joining_worker.py"))
ADDRESS, COUNT, ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
TRAIN = ("-m", "jaxdp.train", "--config", "configs/digits_mlp.yaml", "--devices", "2")
LIMIT_S = 300


class Start(NamedTuple):
    """One process: its environment, its arguments, its interpreter."""

    environ: Mapping[str, str]
    argv: tuple[str, ...] = TRAIN
    python: str = sys.executable


class End(NamedTuple):
    """How a process ended: its exit code, its error stream, after how long."""

    code: int
    text: str
    seconds: float


def run(start: Start) -> End:
    """Runs one process to its end."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "SLURM", "OMPI"))
    }
    began = time.monotonic()
    ended = subprocess.run(
        [start.python, *start.argv],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **start.environ},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return End(ended.returncode, ended.stderr, time.monotonic() - began)


def two(port: int, *more: str, argv: tuple[str, ...] = TRAIN, **environ: str) -> list[Start]:
    """Two processes on loopback; `more` goes to the second alone, `environ` to both."""
    place = {ADDRESS: f"127.0.0.1:{port}", COUNT: "2", **environ}
    return [
        Start(place | {ID: "0"}, argv),
        Start(place | {ID: "1"}, (*argv, *more)),
    ]


def with_environ(start: Start, **environ: str) -> Start:
    """The same with other variables; those given as "" are left out."""
    merged = {**start.environ, **environ}
    return start._replace(environ={k: v for k, v in merged.items() if v})


def cases(port: int, taken: int, other_python: str | None) -> dict[str, list[Start]]:
    """Mistake -> the processes that make it."""
    both = two(port)
    worker = {what: two(port, argv=(WORKER, what)) for what in ("program", "leaf")}
    found = {
        "P1 rank 1 not started, 12 s allowed": [with_environ(both[0], JAXDP_JOIN_TIMEOUT="12")],
        "P1 rank 0 not started, 12 s allowed": [with_environ(both[1], JAXDP_JOIN_TIMEOUT="12")],
        "P2 port in use": two(taken)[:1],
        "P2 port 99999": two(99999)[:1],
        "P2 no port": [with_environ(both[0], **{ADDRESS: "localhost"})],
        "P2 host that does not resolve": [
            with_environ(both[0], **{ADDRESS: f"no-such-host.invalid:{port}"})
        ],
        "P2 address of another host": [with_environ(both[0], **{ADDRESS: f"192.0.2.9:{port}"})],
        "rank 2 of 2": [with_environ(both[1], **{ID: "2"})],
        "no process id": [with_environ(both[1], **{ID: ""})],
        "two processes with rank 1 of 3": [
            with_environ(both[rank], **{COUNT: "3"}) for rank in (0, 1, 1)
        ],
        "R5 another configuration": two(port, "--seed", "3"),
        "R5 another process count": [both[0], with_environ(both[1], **{COUNT: "3"})],
        "a key mistyped on both": two(port, argv=(*TRAIN, "--sed", "3")),
        "a key mistyped on rank 1": two(port, "--sed", "3"),
        "R5 another program": worker["program"],
        "R6 another dtype of a leaf": worker["leaf"],
    }
    if other_python:
        found["R5 another version of JAX"] = [both[0], both[1]._replace(python=other_python)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--other-python")
    other = parser.parse_args().other_python
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        for name in cases(1, 1, other):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            starts = cases(port, server.getsockname()[1], other)[name]
            with ThreadPoolExecutor(len(starts)) as pool:
                ends = list(pool.map(run, starts))
            codes = ", ".join(str(end.code) for end in ends)
            seconds = ", ".join(f"{end.seconds:.1f}" for end in ends)
            print(f"\n{name}: exit {codes} after {seconds} s", flush=True)
            for end in ends:
                for line in end.text.splitlines():
                    print(f"    {line}", flush=True)


if __name__ == "__main__":
    main()

"""A worker for tests of the launcher: beats like a training, and does what it is told, without JAX.

`python -m launched_worker FOLDER STEPS [RANK:STEP:ACTION ...]`; its process id, and those of what
it starts, stand in FOLDER/pids.  Faults happen in the first attempt, with `!` before them in each.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from jaxdp.runtime.control import Failure, Heartbeat, heartbeat_file, stacks_file, write_failure
from jaxdp.runtime.phases import SAVE, START, STEP

RANK = int(os.environ.get("JAX_PROCESS_ID", "0"))
ATTEMPT = int(os.environ["JAXDP_ATTEMPT"])
CONTROL = Path(os.environ["JAXDP_CONTROL"])
FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
stopping = False


def note(pid):
    with (FOLDER / "pids").open("a") as file:
        file.write(f"{pid} {RANK} {ATTEMPT}\n")


def beat(phase, step):
    beat.number += 1
    record = Heartbeat(RANK, os.getpid(), phase, step, time.monotonic(), beat.number)
    heartbeat_file(CONTROL, RANK).write_bytes(record.record())


beat.number = 0


def fail(step):
    try:
        raise ValueError(f"record {step} is bad")
    except ValueError as error:
        write_failure(
            CONTROL,
            Failure(RANK, os.getpid(), "here", 1, "ValueError", str(error), traceback.format_exc(),
                    STEP, step, time.time(), "own"),
        )  # fmt: skip
        traceback.print_exc()
    os._exit(1)


def children():
    """One in our group and one that left our session, as data loaders and daemons do."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    note(subprocess.Popen(sleep).pid)
    note(subprocess.Popen(sleep, start_new_session=True, stdout=2).pid)
    note(subprocess.Popen(sleep, env={}).pid)


def act(action, step):
    match action:
        case "kill" | "term" | "stop" | "int":
            os.kill(os.getpid(), getattr(signal, f"SIG{action.upper()}"))
        case "fail":
            fail(step)
        case "raise":
            raise ValueError("no file about it")
        case "exit":
            os._exit(1)
        case "hang":
            time.sleep(600)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note(0)
        case "children":
            children()
        case "nap":
            beat(SAVE, step)
            time.sleep(2.5)
        case "talk":
            for i in range(50_000):
                print(f"{RANK} says line {i}")
        case _:
            os._exit(int(action))


def stop(number, frame):
    global stopping
    stopping = True


def main():
    if int(os.environ.get("JAX_NUM_PROCESSES", "1")) == 3 and "even" in sys.argv[3:]:
        print("3 does not divide 4", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    faulthandler.register(signal.SIGUSR1, stacks_file(CONTROL, RANK).open("w"))
    note(os.getpid())
    beat(START, 0)
    if "sick" in sys.argv[3:]:
        os._exit(6)
    faults = [word for word in sys.argv[3:] if ":" in word]
    for step in range(1, STEPS + 1):
        beat(STEP, step)
        for fault in faults:
            rank, at, action = fault.removeprefix("!").split(":")
            first = ATTEMPT == 0 or fault.startswith("!")
            if rank in ("*", str(RANK)) and at == str(step) and first:
                act(action, step)
        print(f"step {step}")
        time.sleep(0.03)
        if stopping:
            sys.exit(75)


main()

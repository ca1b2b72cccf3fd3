"""What being watched costs a step: the heartbeat, and what its own time takes to be known.

python tests/benchmarks/watch_cost.py [--steps 100000]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

from jaxdp.runtime.control import CONTROL
from jaxdp.runtime.faults import FAULTS
from jaxdp.runtime.watch import watching


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    print(f"microseconds a step, the best of 5 turns of {steps:,} steps")
    for name, watched, faults in (
        ("no launcher", False, ""),
        ("watched", True, ""),
        ("watched, with a fault point ahead", True, "0:999999999:step:kill"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            os.environ.update({CONTROL: folder if watched else "", FAULTS: faults})
            print(f"{1e6 * best(Path(folder), steps):8.2f}  {name}")


def best(folder: Path, steps: int) -> float:
    """Seconds that a step's `enter` takes."""
    taken = []
    with watching(0, folder) as watch:
        for _ in range(5):
            started = time.perf_counter()
            for step in range(steps):
                watch.enter("step", step)
            taken.append((time.perf_counter() - started) / steps)
    return min(taken)


if __name__ == "__main__":
    main()

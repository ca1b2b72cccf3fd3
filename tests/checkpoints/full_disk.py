"""A disk that fills up at random moments of saves, and is freed: what is left?

    python tests/checkpoints/full_disk.py [--count N] [--seed S]

Each trial fills a small tmpfs to a random rest, before a save or while it is written.  However the
save ends, the steps that were there have to be there to the bit, nothing else may be, and the next
save has to work once there is room.  Needs the right to mount (root).
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoints import Checkpoints
from jaxdp.checkpoints.quiet import quiet
from jaxdp.errors import StorageError
from jaxdp.state import TrainState
from jaxdp.training import saving
from jaxdp.training.saving import Saver

DISK_BYTES, STATE_BYTES = 24 << 20, 2 << 20
KEEP = 2


@contextlib.contextmanager
def small_disk():
    """A folder on a disk of its own; None where that is not allowed."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def random_state(rng, step):
    counts = [jnp.int32(x) for x in (step, 0, 0, 0)]
    w = rng.normal(size=STATE_BYTES // 8).astype(np.float32)  # incompressible, nearly
    v = rng.normal(size=STATE_BYTES // 8).astype(np.float32)
    return TrainState(*counts, {"w": jnp.asarray(w)}, (), {"v": jnp.asarray(v)}, ())


def fill(disk, rest_bytes):
    """Takes all room but `rest_bytes`."""
    with contextlib.suppress(OSError), open(disk / "ballast", "wb") as file:
        free = os.statvfs(disk)
        size = free.f_bavail * free.f_frsize - rest_bytes
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


def trial(disk, saver, states, step, rng):
    """Saves `step` on a disk that is full or gets so; returns what happened, in a word."""
    rest = int(rng.integers(0, STATE_BYTES * 3 // 2))
    delay_s = rng.choice([0.0, rng.uniform(0, 0.3)])
    timer = threading.Timer(delay_s, fill, (disk, rest))
    if delay_s:
        timer.start()
    else:
        fill(disk, rest)
    states[step] = random_state(rng, step)
    try:
        saver.save(step, states[step], {}, whole=True)
        happened = "saved"
    except StorageError as error:
        del states[step]
        happened = "refused" if " are free; " in str(error) else "failed"
    if delay_s:
        timer.join()
    (disk / "ballast").unlink(missing_ok=True)
    return happened


def check(saver, states):
    """Asserts that the newest steps are there to the bit, and nothing besides."""
    expected = sorted(states)[-KEEP:]
    assert sorted(path.name for path in saver.checkpoints.folder.iterdir()) == [
        str(step) for step in sorted(expected, key=str)
    ], sorted(saver.checkpoints.folder.iterdir())
    newest, _, lines = saver.checkpoints.restore(states[expected[-1]])
    assert lines == []
    jax.tree.map(np.testing.assert_array_equal, newest, states[expected[-1]])
    for step in [step for step in states if step not in expected]:
        del states[step]


def run(count, seed, disk):
    """Trials one after the other in one run; returns how often what happened."""
    saving._DELAYS_S = ()  # the disk is freed after the trial, not during it
    rng, seen, states = np.random.default_rng(seed), Counter(), {}
    with Checkpoints(disk / "run" / "checkpoints", KEEP) as checkpoints:
        saver = Saver(checkpoints, None, STATE_BYTES, lambda line: None)
        step = 0
        for _ in range(count):
            states[step + 1] = random_state(rng, step + 1)
            saver.save(step + 1, states[step + 1], {}, whole=True)
            check(saver, states)
            step += 2
            seen[trial(disk, saver, states, step, rng)] += 1
            check(saver, states)
    assert {path.name for path in disk.iterdir()} == {"run"}
    assert [path.name for path in (disk / "run").iterdir()] == ["checkpoints"]
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with quiet(), small_disk() as disk:
        if disk is None:
            print("no right to mount a small disk", file=sys.stderr)
            return 1
        seen = run(args.count, args.seed, disk)
    print(
        f"{args.count} trials, seed {args.seed}: " + ", ".join(f"{n} {w}" for w, n in seen.items())
    )
    print("after each: steps intact to the bit, nothing else left, the next save works")
    return 0


if __name__ == "__main__":
    sys.exit(main())

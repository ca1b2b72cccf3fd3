"""What a checkpoint costs: the stall of a save, a restore, its verification; against plain Orbax.

    python tests/benchmarks/checkpoint_cost.py [--megabytes 200] [--saves 50] [--turns 5]

The state is float32 on one device.  A stall is the time in which the training could not go on: of
ours the call of `save`, with nothing left of the save before it; of Orbax the same, with its own
copy-free snapshot of an immutable state.  Both write in the background.  Memory is the resident set
after each save; what must not happen is that it grows.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxdp.checkpoints import Checkpoints, leaves
from jaxdp.checkpoints.restoring import verified
from jaxdp.state import TrainState


def state_of(megabytes: int, step: int) -> TrainState:
    """16 leaves, of random numbers, which do not compress."""
    count, rows = jnp.zeros((), jnp.int32), megabytes * 10**6 // 16 // 4 // 1000
    keys = jax.random.split(jax.random.key(step), 16)
    params = {f"w{i:02d}": jax.random.normal(key, (rows, 1000)) for i, key in enumerate(keys)}
    return jax.block_until_ready(TrainState(count + step, count, count, count, params, {}, (), ()))


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def resident_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


def tell(name: str, times: list[float]) -> None:
    print(f"{name:44s} {1e3 * np.median(times):8.1f} ms ({1e3 * min(times):.1f} to "
          f"{1e3 * max(times):.1f})", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        time_saves(Path(folder), args)
        time_restores(Path(folder), args)
    with tempfile.TemporaryDirectory() as folder:
        follow_memory(Path(folder), args)


def time_saves(folder: Path, args: argparse.Namespace) -> None:
    """Saves of the two take turns."""
    stalls: dict[str, list[float]] = {"ours": [], "orbax": []}
    whole: dict[str, list[float]] = {"ours": [], "orbax": []}
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with (
        Checkpoints(folder / "ours") as ours,
        ocp.CheckpointManager(folder / "orbax", options=options) as orbax,
    ):
        for step in range(args.turns + 1):
            state = state_of(args.megabytes, step)

            def save_orbax(step: int = step, state: TrainState = state) -> None:
                orbax.save(step, args=ocp.args.StandardSave(state._asdict()))

            for name, save, wait in [
                ("ours", lambda step=step, state=state: ours.save(step, state), ours.wait),
                ("orbax", save_orbax, orbax.wait_until_finished),
            ]:
                stall = seconds(save)
                if step:  # the first compiles
                    stalls[name].append(stall)
                    whole[name].append(stall + seconds(wait))
                else:
                    wait()
    print(f"{args.megabytes} MB on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    for name in stalls:
        tell(f"{name}: stall of a save", stalls[name])
        tell(f"{name}: until it is complete", whole[name])


def time_restores(folder: Path, args: argparse.Namespace) -> None:
    """What is there is read again; the files are in the page cache."""
    like = state_of(args.megabytes, 0)
    times: dict[str, list[float]] = {}
    for _ in range(args.turns + 1):
        with Checkpoints(folder / "ours") as ours:
            step = ours.steps()[-1]
            times.setdefault("ours: restore, verified", []).append(
                seconds(lambda ours=ours: ours.restore(like))
            )
        times.setdefault("  of that, files", []).append(
            seconds(lambda step=step: verified(folder / "ours" / str(step)))
        )
        times.setdefault("  of that, leaves", []).append(
            seconds(lambda: leaves.leaf_table(like._asdict()))
        )
        with ocp.CheckpointManager(folder / "orbax") as orbax:
            target = ocp.args.StandardRestore(like._asdict())
            times.setdefault("orbax: restore", []).append(
                seconds(
                    lambda orbax=orbax, args=target: orbax.restore(orbax.latest_step(), args=args)
                )
            )
    for name, found in times.items():
        tell(name, found[1:])


def follow_memory(folder: Path, args: argparse.Namespace) -> None:
    state, seen = state_of(args.megabytes, 1), []
    with Checkpoints(folder / "c", keep=1) as checkpoints:
        for step in range(args.saves):
            checkpoints.save(step, state)
            checkpoints.wait()
            seen.append(resident_mb())
    tenth = max(1, len(seen) // 10)
    early, late = np.median(seen[tenth : 2 * tenth or None]), np.median(seen[-tenth:])
    print(
        f"memory over {args.saves} saves: {early:.0f} MB early, {late:.0f} MB at the end, "
        f"at most {max(seen):.0f} MB"
    )


if __name__ == "__main__":
    main()

"""What the reproducible mode promises, and what it costs, on a configuration.

    python tests/benchmarks/reproducible.py configs/gpt_tiny.yaml [STEPS]

Digests of the parameters after STEPS steps on 1, 2, 4 and 8 emulated devices, in reproducible and
in fast mode, and of a run that goes from 2 to 8 to 1 devices; medians of the steps' times, both
modes in turns.  The devices share one machine's cores: times are no measure of a network.
"""

import sys
import time

import jax
import numpy as np

from jaxdp import load_config
from jaxdp.assemble import assemble, load_data
from jaxdp.mesh import replicate, use_devices
from jaxdp.trees import digest

SHARDS = 8
MODES = (("reproducible", SHARDS), ("fast", None))


def main(path: str, steps: int) -> None:
    """Prints a line per number of devices, then the run that changes it."""
    print(f"jax {jax.__version__}, {path}, {steps} steps; emulated devices, not a network")
    devices = use_devices(SHARDS)
    dataset = load_data(load_config(path))
    found = set()
    for n in (1, 2, 4, SHARDS):
        runs = [[mode, *start(path, dataset, devices[:n], shards)] for mode, shards in MODES]
        for t in range(steps):
            for entry in runs:
                step(entry, t)
        for mode, _, state, _, seconds, times in runs:
            print(
                f"{n} devices  {mode:12}  params {digest(jax.device_get(state.params))[:16]}  "
                f"{np.median(times[2:]) * 1e3:7.1f} ms a step, compiled in {seconds:.1f} s",
                flush=True,
            )
        found.add(digest(jax.device_get(runs[0][2].params)))
    state = None
    for n, first, last in ((2, 0, steps // 3), (8, steps // 3, steps // 2), (1, steps // 2, steps)):
        entry = ["", *start(path, dataset, devices[:n], SHARDS)]
        if state is not None:
            entry[2] = replicate(entry[1].mesh, state)
        for t in range(first, last):
            step(entry, t)
        state = jax.device_get(entry[2])
    found.add(digest(state.params))
    print(f"2, then 8, then 1 devices   params {digest(state.params)[:16]}")
    print("the same bits" if len(found) == 1 else f"NOT the same bits: {len(found)} digests")


def start(path, dataset, devices, shards):
    """(job, state, compiled step, seconds of compiling, times of steps)."""
    algorithm = "recursive_doubling"
    given = [("devices", len(devices)), ("sync.logical_shards", shards)]
    config = load_config(path, [*given, ("sync.algorithm", algorithm)])
    job = assemble(config, dataset, devices)
    state = job.init()
    begun = time.perf_counter()
    run = job.step.run.lower(state, job.step.place(job.loader.batch(0))).compile()
    return job, state, run, time.perf_counter() - begun, []


def step(entry, t: int) -> None:
    """Step t of a run, in place."""
    _, job, state, run, _, times = entry
    batch = job.step.place(job.loader.batch(t))
    begun = time.perf_counter()
    entry[2], _ = jax.block_until_ready(run(state, batch))
    times.append(time.perf_counter() - begun)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)

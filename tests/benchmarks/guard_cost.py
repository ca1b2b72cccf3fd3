"""What comparing the replicas costs: one comparison over K steps of training.

    python tests/benchmarks/guard_cost.py [CONFIG] [--turns 9] [--steps 4] [--every 100]

Steps and comparisons take turns on the same state; the medians are compared.  A comparison is
timed as the loop makes it: dispatched, waited for, its hashes compared on the host.
"""

import argparse
import time

import jax
import numpy as np

from jaxdp import load_config
from jaxdp.assemble import assemble, load_data
from jaxdp.guard import compare_replicas
from jaxdp.mesh import use_devices
from jaxdp.trees import count_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="configs/gpt_stdlib.yaml")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--every", type=int, default=100)
    args = parser.parse_args()
    config = load_config(args.config)
    job = assemble(config, load_data(config), use_devices(config.devices))
    state, batch = job.init(), job.step.place(job.loader.batch(0))
    state, _ = jax.block_until_ready(job.step(state, batch))
    started = time.perf_counter()
    compare_replicas(job.mesh, state)
    first_s = time.perf_counter() - started
    step_s, check_s = [], []
    for _ in range(args.turns):
        started = time.perf_counter()
        for _ in range(args.steps):
            state, _ = job.step(state, batch)
        jax.block_until_ready(state)
        step_s.append((time.perf_counter() - started) / args.steps)
        started = time.perf_counter()
        compare_replicas(job.mesh, state)
        check_s.append(time.perf_counter() - started)
    step, check = float(np.median(step_s)), float(np.median(check_s))
    print(
        f"{args.config}: {count_bytes(state):,} bytes of state on {job.mesh.size} devices; "
        f"a comparison {1e3 * check:.2f} ms "
        f"({1e3 * min(check_s):.2f} to {1e3 * max(check_s):.2f}), "
        f"a step {1e3 * step:.1f} ms; every {args.every} steps: "
        f"{check / (args.every * step):.4%} of the step time; the first, compiled: {first_s:.2f} s"
    )


if __name__ == "__main__":
    main()

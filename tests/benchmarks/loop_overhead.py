"""What the loop costs: `fit` against a bare loop over the same compiled step, in turns.

    python tests/benchmarks/loop_overhead.py [CONFIG] [--turns 9] [--steps 300]

The bare loop calls the compiled step on batches that are on the devices already; `fit` loads,
places, logs and times them.  Both keep two steps in flight: with hundreds of them, the devices of
XLA:CPU take all threads of their pool and wait for each other until the process is ended.
"""

import argparse
import time

import jax
import numpy as np

from jaxdp import fit, load_config
from jaxdp.assemble import assemble, load_data
from jaxdp.loop import Every
from jaxdp.mesh import use_devices


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="configs/digits_mlp.yaml")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    config = load_config(args.config)
    job = assemble(config, load_data(config), use_devices(config.devices))
    batches = [job.step.place(job.loader.batch(t)) for t in range(8)]
    compiled = job.step.run.lower(job.init(), batches[0]).compile()

    def bare() -> float:
        state = job.init()
        state, metrics = compiled(state, batches[0])
        jax.block_until_ready(metrics)
        started = time.perf_counter()
        for t in range(args.steps):
            before = metrics["loss"]
            state, metrics = compiled(state, batches[t % 8])
            before.block_until_ready()
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / args.steps

    def fitted() -> float:
        log = Every(config.log.every, lambda step, row: None)
        return fit(job.step, job.init(), job.loader, args.steps, log=log).train_s / args.steps

    fitted(), bare()
    pairs = [(fitted(), bare()) for _ in range(args.turns)]
    ratios = [a / b for a, b in pairs]
    print(
        f"{args.config}: fit {1e3 * np.median([a for a, _ in pairs]):.3f} ms, "
        f"bare {1e3 * np.median([b for _, b in pairs]):.3f} ms a step, ratio "
        f"{np.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()

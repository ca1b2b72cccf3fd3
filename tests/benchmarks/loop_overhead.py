"""What the loop costs: `fit` against bare loops over the same compiled step, in turns.

    python tests/benchmarks/loop_overhead.py [CONFIG] [--turns 9] [--steps 300]

One bare loop loads and places each batch in line, as a training must; the other is given batches
that are on the devices already, and so does no input work at all.  All keep two steps in flight:
with hundreds of them, the devices of XLA:CPU take all threads of their pool and wait for each other
until the process is ended.
"""

import argparse
import time
from collections import deque

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
    resident = [job.step.place(job.loader.batch(t)) for t in range(8)]
    compiled = job.step.run.lower(job.init(), resident[0]).compile()

    def bare(batch_of) -> float:
        state, in_flight = job.init(), deque()
        state, metrics = compiled(state, resident[0])
        jax.block_until_ready(metrics)
        started = time.perf_counter()
        for t in range(args.steps):
            state, metrics = compiled(state, batch_of(t))
            in_flight.append(metrics["loss"])
            if len(in_flight) > 2:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / args.steps

    def fitted() -> float:
        log = Every(config.log.every, lambda step, row: None)
        return fit(job.step, job.init(), job.loader, args.steps, log=log).train_s / args.steps

    loops = {
        "fit": fitted,
        "bare, loading": lambda: bare(lambda t: job.step.place(job.loader.batch(t))),
        "bare, no input": lambda: bare(lambda t: resident[t % 8]),
    }
    seconds = {name: [] for name in loops}
    for turn in range(args.turns + 1):
        for name, loop in loops.items():
            taken = loop()
            if turn:  # the first warms up
                seconds[name].append(taken)
    print(f"{args.config}: median ms a step, and fit's time over each, turn by turn")
    for name, taken in seconds.items():
        ratios = np.array(seconds["fit"]) / np.array(taken)
        print(
            f"{name:>15} {1e3 * np.median(taken):8.3f} ms   fit / this: {np.median(ratios):.3f} "
            f"({ratios.min():.3f} to {ratios.max():.3f})"
        )


if __name__ == "__main__":
    main()

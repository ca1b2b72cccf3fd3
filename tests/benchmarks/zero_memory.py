"""What ZeRO-1 saves, the optimizer's bytes on each device, and costs: nothing in bytes sent.

    python tests/benchmarks/zero_memory.py [configs/gpt_tiny.yaml] [--steps 60]

Bytes are those of the arrays on the devices; the peak is the compiler's: arguments, results and
temporaries of one device.
"""

import argparse

import jax

from jaxdp import emulate, hlo, load_config
from jaxdp.assemble import assemble, load_data
from jaxdp.plan import as_planned
from jaxdp.trees import bytes_per_device


def main(path: str, steps: int) -> None:
    """A row for each number of devices, plain and sharded."""
    emulate(8)
    print(f"jax {jax.__version__}, {path}, loss after {steps} steps")
    print("devices  optimizer  state bytes  peak bytes  sent bytes  as planned  loss")
    for n in (1, 2, 4, 8):
        for shard in (False, True):
            config = load_config(path, [("sync.shard_optimizer", shard), ("devices", n)])
            job = assemble(config, load_data(config), jax.devices()[:n])
            state, metrics = job.init(), {}
            held, batch = bytes_per_device(state.opt_state), job.step.place(job.loader.batch(0))
            run = job.step.run.lower(state, batch).compile()
            plan, found = job.step.plan(state, batch), hlo.collectives(run.as_text() or "")
            memory = run.memory_analysis()
            peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
            peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
            for t in range(steps):
                state, metrics = run(state, job.step.place(job.loader.batch(t)))
                jax.block_until_ready(metrics)
            loss = float(metrics["loss"]) if metrics else float("nan")
            print(
                f"{n:7}  {'sharded' if shard else 'plain':9}  {held:11,}  {peak:10,}  "
                f"{plan.sent_bytes:10,}  {as_planned(plan, found)!s:10}  {loss:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", default="configs/gpt_tiny.yaml")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    main(args.path, args.steps)

"""What buckets, wires and compression cost and lose: step time, bytes and error on a model.

    python tests/benchmarks/sync_options.py configs/gpt_tiny.yaml [STEPS]

On emulated devices "sending" is a copy in shared memory: the times show what an option costs in
work, never what it saves on a network.
"""

import sys
import time
from functools import partial

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdp import hlo, load_config, on_mesh
from jaxdp.assemble import assemble, load_data, make_sync
from jaxdp.mesh import AXIS, use_devices
from jaxdp.plan import as_planned

OPTIONS = (
    {},
    {"bucket_bytes": "400K", "first_bucket_bytes": "50K"},
    {"algorithm": "ring"},
    {"algorithm": "all_to_all"},
    {"wire": "bfloat16"},
    {"wire": "bfloat16", "algorithm": "ring"},
    {"wire": "bfloat16", "algorithm": "all_to_all"},
    {"wire": "float16", "algorithm": "all_to_all"},
    {"wire": "int8"},
    {"wire": "int8", "bucket_bytes": "400K", "first_bucket_bytes": "50K"},
    {"compression": "top_k"},
    {"compression": "power_sgd"},
)


def main(path: str, steps: int) -> None:
    """Compiles a step with each option, times them in turns, prints a table."""
    print(f"jax {jax.__version__}, {path}, {steps} steps each; shared memory, not a network")
    runs = []
    for options in OPTIONS:
        given = [(f"sync.{key}", value) for key, value in options.items()]
        config = load_config(path, given)
        dataset = load_data(config)
        job = assemble(config, dataset, use_devices(config.devices))
        state, batch = job.init(), job.step.place(job.loader.batch(0))
        run = job.step.run.lower(state, batch).compile()
        plan, found = job.step.plan(state, batch), hlo.collectives(run.as_text() or "")
        error = wire_error(make_sync(config), job.mesh, state.params)
        runs.append([run, state, batch, [], (options, plan, found, error)])
    for _ in range(steps):
        for entry in runs:
            run, state, batch, times, _ = entry
            start = time.perf_counter()
            entry[1], _ = jax.block_until_ready(run(state, batch))
            times.append(time.perf_counter() - start)
    for *_, times, (options, plan, found, error) in runs:
        label = (
            " ".join(f"{key} {value}" for key, value in options.items()) or "psum, one reduction"
        )
        print(
            f"{label:58} {np.median(times[3:]) * 1e3:7.2f} ms  planned "
            f"{sum(c.result_bytes for c in plan.collectives):>9,} B  found "
            f"{sum(c.result_bytes for c in found):>9,} B  sent {plan.sent_bytes:>9,} B  "
            f"{'as planned' if as_planned(plan, found) else 'not as planned'}  error {error:.1e}"
        )


def wire_error(sync, mesh, params) -> float:
    """||sum - float64 sum|| / ||float64 sum|| of normal gradients shaped as the parameters."""
    rng = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda p: rng.normal(size=(mesh.size, *p.shape)).astype(np.float32), params
    )
    scalars = {"loss": np.ones((mesh.size, 2), np.float32)}

    def body(grads, scalars):
        sums = jax.tree.map(lambda x: x[0], {"grads": grads, "scalars": scalars, "model_state": {}})
        return sync.update(sums, sync.init(params), AXIS)[0]["grads"]

    summed = jax.jit(on_mesh(body, mesh, P(AXIS), P()))(grads, scalars)
    exact = jax.tree.map(partial(np.sum, axis=0, dtype=np.float64), grads)
    off = jax.tree.map(lambda a, b: ((np.float64(a) - b) ** 2).sum(), summed, exact)
    size = jax.tree.map(lambda b: (b**2).sum(), exact)
    return float(np.sqrt(sum(jax.tree.leaves(off)) / sum(jax.tree.leaves(size))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40)

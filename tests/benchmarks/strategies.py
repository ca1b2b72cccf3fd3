"""Every strategy on one configuration: its bytes, its error, what it learns in as many steps.

    python tests/benchmarks/strategies.py configs/gpt_tiny.yaml [STEPS]

A row for each: bytes that the busiest rank sends in a step, as planned by formula and as counted in
the compiled program; ||sum - float64 sum|| / ||float64 sum|| of normal gradients; seconds to
compile; milliseconds of a step, the median; the last step's loss; the held-out metrics.  Local SGD
makes as many optimizer steps on as many examples: a step of its run holds several.

On emulated devices "sending" is a copy in shared memory: times show what a strategy costs in work,
never what it saves on a network.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdp import hlo, load_config, on_mesh
from jaxdp.assemble import assemble, load_data, make_sync
from jaxdp.errors import UserError
from jaxdp.mesh import AXIS, use_devices
from jaxdp.plan import as_planned
from jaxdp.sync import GradSync

BUCKETS = {"sync.bucket_bytes": "100K", "sync.first_bucket_bytes": "20K"}
LOCAL_STEPS = 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "psum": {},
    "ring": {"sync.algorithm": "ring"},
    "recursive doubling": {"sync.algorithm": "recursive_doubling"},
    "tree": {"sync.algorithm": "tree"},
    "all-to-all": {"sync.algorithm": "all_to_all"},
    "buckets": BUCKETS,
    "4 microbatches": {**BUCKETS, "microbatches": 4},
    "4, last peeled": {**BUCKETS, "microbatches": 4, "sync.peel_last": True},
    "bfloat16, psum": {"sync.wire": "bfloat16"},
    "bfloat16, ring": {"sync.wire": "bfloat16", "sync.algorithm": "ring"},
    "bfloat16": {"sync.wire": "bfloat16", "sync.algorithm": "all_to_all"},
    "float16": {"sync.wire": "float16", "sync.algorithm": "all_to_all"},
    "int8": {"sync.wire": "int8"},
    "int8, buckets": {"sync.wire": "int8", **BUCKETS},
    "ZeRO-1": {"sync.shard_optimizer": True},
    "top-k 10 %": {"sync.compression": "top_k", "sync.top_k_fraction": 0.1},
    "top-k 1 %": {"sync.compression": "top_k", "sync.top_k_fraction": 0.01},
    "top-k 0.1 %": {"sync.compression": "top_k", "sync.top_k_fraction": 0.001},
    "PowerSGD 4": {"sync.compression": "power_sgd", "sync.power_sgd_rank": 4},
    "PowerSGD 1": {"sync.compression": "power_sgd", "sync.power_sgd_rank": 1},
    "local SGD": {"sync.local_steps": LOCAL_STEPS},
    "DiLoCo": {
        "sync.local_steps": LOCAL_STEPS,
        "sync.outer_learning_rate": 0.7,
        "sync.outer_momentum": 0.9,
    },
    "reproducible": {"sync.logical_shards": 8},
}


def main(path: str, steps: int | None) -> None:
    """Trains with each strategy in turn, prints a row for each."""
    steps = load_config(path).steps if steps is None else steps
    print(f"jax {jax.__version__}, {path}, {steps} steps; emulated devices, not a network")
    print(f"{'':18} {'planned':>10} {'counted':>10}  as planned    error  compile     step    loss")
    for name, options in STRATEGIES.items():
        try:
            print(f"{name:18} {row(path, steps, options)}", flush=True)
        except UserError as error:
            print(f"{name:18} refused: {error}", flush=True)


def row(path: str, steps: int, options: dict[str, Any]) -> str:
    """One strategy's numbers."""
    config = load_config(path, given(path, steps, options))
    job = assemble(config, load_data(config), use_devices(config.devices))
    state, batch = job.init(), job.step.place(job.loader.batch(0))
    sync = None if config.sync.logical_shards else make_sync(config)
    error = f"{'-':>7}"
    if isinstance(sync, GradSync):
        error = f"{wire_error(sync, job.mesh, state.params):7.1e}"
    begun = time.perf_counter()
    run = job.step.run.lower(state, batch).compile()
    compile_s, times, loss = time.perf_counter() - begun, [], np.nan
    plan, found = job.step.plan(state, batch), hlo.collectives(run.as_text() or "")
    for t in range(config.steps):
        batch = job.step.place(job.loader.batch(t))
        begun = time.perf_counter()
        state, metrics = jax.block_until_ready(run(state, batch))
        times.append(time.perf_counter() - begun)
        loss = float(metrics["loss"])
    held_out = ", ".join(f"{k} {v:.4f}" for k, v in job.evaluate(state).items() if k != "weight")
    assert plan is not None
    return (
        f"{plan.sent_bytes:>10,} {counted_bytes(found, job.mesh.size):>10,}  "
        f"{'yes' if as_planned(plan, found) else 'no':10}  {error}  {compile_s:5.1f} s  "
        f"{np.median(times) * 1e3:6.1f} ms  {loss:6.4f}  {held_out}"
    )


def given(path: str, steps: int, options: dict[str, Any]) -> list[tuple[str, Any]]:
    """The overrides of a strategy: as many optimizer steps on as many examples."""
    config = load_config(path)
    turns = options.get("sync.local_steps", 1)
    keys = {"steps": -(-steps // turns), "global_batch": config.global_batch * turns, **options}
    if config.optimizer.warmup_steps >= keys["steps"]:
        keys["optimizer.warmup_steps"] = keys["steps"] // 10
    return list(keys.items())


def counted_bytes(found: Iterable[hlo.Collective], n: int) -> int:
    """What the busiest of n ranks sends by the collectives of a compiled program.

    What a rank sends for a result of m bytes, at least; of a permute, that of each pair it is in.
    """
    share = (n - 1) / n
    factors = {"all-reduce": 2 * share, "all-gather": share, "all-to-all": share}
    factors |= {"reduce-scatter": n - 1, "collective-broadcast": 1}
    everybody, permuted = 0.0, Counter()
    for one in found:
        everybody += factors.get(one.kind, 0) * one.result_bytes
        for source, _ in one.pairs:
            permuted[source] += one.result_bytes
    return round(everybody) + max(permuted.values(), default=0)


def wire_error(sync: GradSync, mesh: Any, params: Any) -> float:
    """The error of one sum of normal gradients that are shaped as the parameters."""
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
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)

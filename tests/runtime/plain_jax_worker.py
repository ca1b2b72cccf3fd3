"""A data-parallel training on `jax.distributed` and nothing else: see `plain_jax.py`.

    plain_jax_worker.py ADDRESS RANK FOLDER

It goes on until something ends it.  Of ours it has only the fault that it is told to make.
"""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.runtime.faults import FAULTS, FaultPoints, parse_faults
from jaxdp.runtime.phases import STEP

PACE_S = 0.05  # of a step


def main(address: str, rank: int, folder: Path) -> None:
    """Linear regression on random numbers, one device a process."""
    jax.distributed.initialize(address, 2, rank)
    mesh = jax.make_mesh((2,), ("data",))
    inputs = np.random.default_rng(rank).normal(size=(24, 16)).astype(np.float32)
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), inputs)

    def step(weights: jax.Array, batch: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(weights)
        return weights - 0.01 * jax.lax.pmean(gradient, "data")

    compiled = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    weights = jax.device_put(jnp.zeros(16), NamedSharding(mesh, P()))
    faults = FaultPoints(parse_faults(os.environ[FAULTS]), rank, folder)
    number = 0
    while True:
        faults.reach(STEP, number)
        weights = jax.block_until_ready(compiled(weights, batch))
        number += 1
        (folder / f"step-{rank}").write_text(str(number))
        time.sleep(PACE_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

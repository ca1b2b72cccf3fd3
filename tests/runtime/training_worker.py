"""One process of a job that trains: `training_worker.py FOLDER JSON`, JSON a list of what to do.

Each is [name, function below, keyword arguments]; what it returns, or the user's mistake that it
raises, goes to FOLDER/NAME-RANK.json.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import jax
import numpy as np

from jaxdp import fit, load_config, run_training
from jaxdp.assemble import assemble, load_data
from jaxdp.data import Loader
from jaxdp.errors import UserError
from jaxdp.mesh import use_devices


def train(folder, keys, bad=None, stop=None):
    """A run of a configuration; in step `bad` the last process alone meets a NaN."""
    real, reads = Loader.batch, {}

    def batch(self, step, *rows):
        reads[step] = self.indices(step, *rows).tolist()
        found = dict(real(self, step, *rows))
        if step + 1 == bad and jax.process_index() == jax.process_count() - 1:
            found["inputs"] = found["inputs"].copy()
            found["inputs"][-1] = np.nan
        return found

    Loader.batch = batch
    try:
        return run_training(configured(keys), stop_at=lambda t: t == stop) | {"reads": reads}
    finally:
        Loader.batch = real


def configured(keys):
    return load_config(None, list(keys.items()))


def parts(keys):
    config = configured(keys)
    return assemble(config, load_data(config), use_devices(config.devices))


def other_start(folder, keys):
    """Processes that start from different parameters."""
    job = parts(keys)
    params = jax.tree.map(np.array, jax.device_get(job.init().params))
    params["logits"]["bias"][3] += 1e-3 * jax.process_index()
    fit(job.step, job.step.init(params), job.loader, 1)


def other_data(folder, keys):
    """Hosts whose files differ."""
    rng, path = np.random.default_rng(jax.process_index()), folder / f"{jax.process_index()}.npz"
    inputs = rng.normal(size=(96, 4)).astype(np.float32)
    np.savez(path, inputs=inputs, label=np.arange(96) % 3)
    train(folder, keys | {"data.kind": "npz", "data.path": str(path)})


def own_stream(folder, keys, size):
    """A stream of the user's own; every process gives `size` examples, of its own if not all."""
    job = parts(keys)

    class Stream:
        def batch(self, step):
            first = size * jax.process_index() if size < job.loader.global_batch else 0
            return job.loader.batch(step, slice(first, first + size))

    return job.evaluate(fit(job.step, job.init(), Stream(), 1).state)


def main(folder, todo):
    jax.config.update("jax_num_cpu_devices", 2)
    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    size, rank = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
    jax.distributed.initialize(address, size, rank, coordinator_bind_address=address)
    for name, function, arguments in todo:
        try:
            found = globals()[function](folder, **arguments)
        except UserError as error:
            found = {"mistake": str(error)}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # JAX would wait for the others at the interpreter's end

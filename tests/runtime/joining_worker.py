"""A process of a job as tests need it: `joining_worker.py WHAT`, its place from the environment."""

import os
import signal
import sys
import time

import numpy as np

from jaxdp.errors import NumericsError, UserError
from jaxdp.runtime.joining import join
from jaxdp.runtime.leaving import run_worker

STEPS = 20


def program(place):
    what = sys.argv[1]
    config = {"steps": str(STEPS)}
    if what == "config" and place.rank:
        config["steps"] = "7"
    if what == "mistake":
        raise UserError("no such key")
    if what == "mistake of rank 1" and place.rank:
        raise UserError("no such file")
    join(place, config)
    print(f"joined at {time.time():.3f}", flush=True)
    if what == "compiling":
        return fail_while_others_compile(place)
    if what == "asked at its end":
        return asked_at_its_end(place)
    return train(place, what)


def asked_at_its_end(place):
    """To stop, when the other has left already and waits for all to have."""
    if place.rank:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)  # JAX looks for it once a second
    return 0


def fail_while_others_compile(place):
    """A peer that is in no collective, for a long time."""
    if place.rank:
        raise ValueError("a bug")
    time.sleep(60)
    return 0


def train(place, what):
    import jax
    import jax.numpy as jnp
    import optax

    import jaxdp

    dtype = np.float64 if what == "leaf" and place.rank else np.float32
    factor = 3.0 if what == "program" and place.rank else 2.0
    jax.config.update("jax_enable_x64", what == "leaf")

    def loss_fn(params, model_state, batch, keys):
        total = (factor * params["first"] * batch["x"]).sum() + params["second"].sum()
        return total, jnp.float32(len(batch["x"]))

    class Batches:
        def batch(self, step):
            if step == STEPS // 2:
                act(place, what)
            return {"x": np.full(4, step, np.float32)}

    mesh = jaxdp.data_mesh(jax.devices())
    step = jaxdp.make_train_step(loss_fn, optax.sgd(0.1), jaxdp.all_reduce_sync(), mesh)
    state = step.init({"first": np.float32(5), "second": np.ones(3, dtype)})
    result = jaxdp.fit(step, state, Batches(), STEPS)
    if what == "listen":
        print(listening(), flush=True)
    if what == "all":
        raise NumericsError(f"not finite at step {result.step}")
    return 0


def act(place, what):
    """In the middle of the training."""
    if place.rank == 0:
        return
    if what == "raise":
        raise ValueError("a bug")
    if what == "kill":
        os.kill(os.getpid(), 9)


def listening():
    """The addresses on which something listens in this network namespace."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as rows:
            found |= {row.split()[1] for row in list(rows)[1:] if row.split()[3] == "0A"}
    return "listening " + " ".join(sorted(found))


if __name__ == "__main__":
    sys.exit(run_worker(program))

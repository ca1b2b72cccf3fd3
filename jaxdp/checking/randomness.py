"""Does each example draw its own random numbers, from the key that it is given?"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdp.checking.lines import Line
from jaxdp.checking.subject import Subject
from jaxdp.loss_path import checked_loss, primitives
from jaxdp.mesh import data_mesh, on_mesh
from jaxdp.types import Device

NAME = "randomness"
_SAME = 1e-4  # relative, in float32
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma")


def randomness(subject: Subject, devices: Sequence[Device]) -> Line:
    """The loss of one example, twice in a batch, under different keys."""
    params, model_state = jax.tree.map(jnp.asarray, subject.init())
    loss = checked_loss(subject.loss_fn)
    example = {name: x[:1] for name, x in subject.batch(0).items()}

    def body(keys: jax.Array) -> jax.Array:
        batch = {name: jnp.repeat(jnp.asarray(x), len(keys), 0) for name, x in example.items()}
        return loss(params, model_state, batch, keys).sum

    run = on_mesh(body, data_mesh(devices[:1]), P(), P())
    draws = any(name in _RANDOM for name in primitives(jax.make_jaxpr(run)(_keys(0, 1)).jaxpr))
    if not draws:
        return Line(NAME, "n/a", "the loss draws no random numbers")
    total = jax.jit(run)
    pair, other = float(total(_keys(0, 1))), float(total(_keys(2, 3)))
    if pair == other:
        return Line(
            NAME,
            "fail",
            f"the loss is {pair:.6g} whatever keys it is given, and yet draws random numbers: they "
            "are the same on every device and in every step; likely a key of its own: draw from "
            "keys[i] for example i",
        )
    if jax.tree.leaves(model_state):
        detail = "differs from key to key (the model has a state: 'gradients' says the rest)"
        return Line(NAME, "pass", detail)
    apart = float(total(_keys(0))) + float(total(_keys(1)))
    if not np.isclose(pair, apart, rtol=_SAME):
        return Line(
            NAME,
            "fail",
            f"two examples together lose {pair:.6g}, one by one {apart:.6g} with the same keys: "
            "what an example draws depends on its neighbours, and so on the number of devices; "
            "likely one mask for the whole batch: draw from keys[i] for example i",
        )
    return Line(NAME, "pass", "each example draws from its own key: the same for every N")


def _keys(*numbers: int) -> jax.Array:
    key = jax.random.key(7, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array(numbers))

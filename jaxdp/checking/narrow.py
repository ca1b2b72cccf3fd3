"""How precisely a loss computes when its parameters are float64, and what rounding does to it."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdp.checking.subject import Subject
from jaxdp.loss_path import checked_loss, inner_jaxprs
from jaxdp.mesh import data_mesh, on_mesh
from jaxdp.types import Batch, Device, LossFn, PyTree


def narrowest(subject: Subject, device: Device, *, wide: bool) -> Any:
    """The narrowest floating dtype in which the gradient computes something.

    Args:
      wide: for float64 parameters, cast to nothing; else for the training's own.
    """
    loss = checked_loss(subject.loss_fn, None if wide else subject.compute_dtype)

    def gradient(params: PyTree, model_state: PyTree, batch: Batch) -> PyTree:
        keys = jax.random.split(jax.random.key(0), subject.size)
        return jax.grad(lambda p: loss(p, model_state, batch, keys).sum)(params)

    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        start = jax.tree.map(lambda x: np.asarray(x, dtype), subject.init())
        run = on_mesh(gradient, data_mesh([device]), P(), P())
        jaxpr = jax.make_jaxpr(run)(*start, subject.batch(0)).jaxpr
    return max(_computed(jaxpr), key=lambda dtype: float(jnp.finfo(dtype).eps))


def permuted(loss_fn: LossFn) -> LossFn:
    """The same loss, whose examples are added in another order."""

    def loss(params: PyTree, model_state: PyTree, batch: Batch, keys: Any) -> Any:
        order = np.random.default_rng(0).permutation(len(jax.tree.leaves(batch)[0]))
        mixed = {name: x[order] for name, x in batch.items()}
        return loss_fn(params, model_state, mixed, None if keys is None else keys[order])

    return loss


def perturbed(loss_fn: LossFn, size: float) -> LossFn:
    """The same loss, the gradient of each leaf moved by `size` of its root mean square.

    Every element by as much, up or down at random; `-size` moves it the other way.  What is exactly
    0 stays: a row of an embedding that no example reads has no rounding.
    """

    @jax.custom_vjp
    def moved(x: jax.Array, signs: jax.Array) -> jax.Array:
        return x

    def backward(signs: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
        rms = jnp.sqrt(jnp.mean(jnp.square(g)))
        return g + jnp.where(g == 0, 0, size * rms * signs).astype(g.dtype), None

    moved.defvjp(lambda x, signs: (x, signs), backward)

    def loss(params: PyTree, model_state: PyTree, batch: Batch, keys: Any) -> Any:
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x: moved(x, rng.choice((-1.0, 1.0), x.shape)), params)
        return loss_fn(params, model_state, batch, keys)

    return loss


def _computed(jaxpr: Any) -> Iterator[Any]:
    """The floating dtypes of a jaxpr's intermediate values, at any depth."""
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from _computed(inner)
        for variable in eqn.outvars:
            dtype = getattr(variable.aval, "dtype", None)  # keys have dtypes of their own
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                yield jnp.dtype(dtype)

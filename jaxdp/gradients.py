"""Sums on one device, means over all: the arithmetic around the reduction.

Sums and weights are added over microbatches here and over devices by the synchronisation; the
division by the global weight stands in `global_means` and nowhere else.  Whatever the parameters'
dtype, sums are of float32 or wider: float16 ends at 65,504, and bfloat16 counts exactly to 256.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.sync import Sums
from jaxdp.types import Batch, LossFn, PyTree


def local_sums(
    loss: LossFn,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
    axis_name: str,
    peel_last: bool = False,
) -> Sums:
    """What this device gives to the reduction: `shard_sums` of the shard with its number."""
    rank, n = lax.axis_index(axis_name), lax.axis_size(axis_name)
    return shard_sums(loss, params, model_state, batch, key, rank, n, peel_last)


def shard_sums(
    loss: LossFn,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
    number: jax.Array,
    shards: int,
    peel_last: bool = False,
) -> Sums:
    """What a shard gives to the reduction: `accumulated`, the model state times its weight."""
    sums, model_state = accumulated(
        loss, params, model_state, batch, key, number, shards, peel_last=peel_last
    )
    return sums | {"model_state": weighted(model_state, sums["scalars"]["loss"][1])}


def weighted(tree: PyTree, weight: jax.Array) -> PyTree:
    """The tree, widened, times a shard's weight, for a mean over shards."""
    return jax.tree.map(lambda x: x * weight.astype(x.dtype), widened(tree))


def widened(tree: PyTree) -> PyTree:
    """Leaves of float32 at least."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def as_before(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the dtypes of `old`: a step keeps those of its state."""
    return jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), new, old)


def accumulated(
    loss: LossFn,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
    number: jax.Array,
    shards: int,
    first_part: jax.Array | int = 0,
    peel_last: bool = False,
) -> tuple[Sums, PyTree]:
    """A shard's sums over its microbatches, of "grads" and "scalars", and the model state.

    Args:
      loss: as `loss_path.checked_loss` returns it.
      params, model_state: of the step's beginning; the model state passes from microbatch to
        microbatch.
      batch: leaves `[microbatches, b, ...]`.
      key: the step's random key; example i of the global batch gets `fold_in(key, i)`, so that
        its randomness is the same however the batch is spread over devices.
      number: int32 scalar, of the shard (a device's, or a logical one): it holds examples
        number * b to (number + 1) * b of every microbatch.
      shards: into how many every microbatch is cut.
      first_part: int scalar, how many parts of the global batch come before these microbatches.
      peel_last: whether the last microbatch is computed behind the loop over the others, so that
        each gradient is there when its backward pass made it and not when the loop ends.  The same
        additions in the same order; the loss is compiled twice.
    """
    microbatches, b = jax.tree.leaves(batch)[0].shape[:2]
    first_of_microbatch = (first_part + jnp.arange(microbatches)) * b * shards
    row = number * b + jnp.arange(b)

    def one(model_state: PyTree, microbatch: tuple[jax.Array, Batch]) -> tuple[Sums, PyTree]:
        first, examples = microbatch
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, first + row)
        return _sums(loss, params, model_state, examples, keys)

    def add(carry: tuple[Sums, PyTree], microbatch: tuple[jax.Array, Batch]):
        sums, model_state = carry
        new, model_state = one(model_state, microbatch)
        return (jax.tree.map(jnp.add, sums, new), model_state), None

    stacked = (first_of_microbatch, batch)
    first = jax.tree.map(lambda x: x[0], stacked)
    if microbatches == 1:
        sums, model_state = one(model_state, first)
    else:
        shapes, _ = jax.eval_shape(one, model_state, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        looped = jax.tree.map(lambda x: x[:-1], stacked) if peel_last else stacked
        carry, _ = lax.scan(add, (zeros, model_state), looped)
        if peel_last:
            carry, _ = add(carry, jax.tree.map(lambda x: x[-1], stacked))
        sums, model_state = carry
    return sums, model_state


def _sums(
    loss: LossFn, params: PyTree, model_state: PyTree, examples: Batch, keys: jax.Array
) -> tuple[Sums, PyTree]:
    def scalar_first(params: PyTree):
        out = loss(params, model_state, examples, keys)
        return out.sum, out

    (_, out), grads = jax.value_and_grad(scalar_first, has_aux=True)(params)
    grads = widened(grads)
    # one dtype for gradients and scalars: they travel in the same bucket
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(grads))
    pairs = {"loss": (out.sum, out.weight), **out.metrics}
    scalars = {
        name: jnp.stack([jnp.asarray(x, dtype) for x in pair]) for name, pair in pairs.items()
    }
    return {"grads": grads, "scalars": scalars}, out.model_state


def global_means(sums: Sums) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Gradients, model state and metrics of the global batch, from sums over all devices.

    A global weight of 0 gives zeros, not NaN; the step then applies nothing.

    Returns:
      (gradients, model state, metrics): each sum divided by its weight, in the sums' dtypes;
      metrics hold "weight" too.
    """
    weight = sums["scalars"]["loss"][1]
    divisor = jnp.where(weight > 0, weight, 1)
    grads, model_state = jax.tree.map(
        lambda x: x / divisor.astype(x.dtype), (sums["grads"], sums["model_state"])
    )
    means = {name: total / jnp.where(w > 0, w, 1) for name, (total, w) in sums["scalars"].items()}
    return grads, model_state, means | {"weight": weight}


def clip(grads: PyTree, norm: jax.Array, limit: float) -> PyTree:
    """Gradients scaled so that their global norm, `norm`, is at most `limit`."""
    scale = jnp.minimum(1, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)

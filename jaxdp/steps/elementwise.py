"""Is an optimizer elementwise, so that each device may update its share alone?

Asked by trying: the update of a leaf must be the updates of its two halves, joined.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.errors import UserError
from jaxdp.gradients import widened
from jaxdp.sync.sharded import all_shares, cut, shares_of
from jaxdp.trees import named_leaves
from jaxdp.types import PyTree

_MOST = 6  # elements along a dim of the leaves that are tried
# a limit inside the chain shows itself when gradients are large; a NaN, when the optimizer looks at
# the whole tree to decide whether to apply anything
_SCALES = (1.0, 1e6, np.nan)


def refuse_unless_elementwise(
    optimizer: optax.GradientTransformationExtraArgs, params: PyTree
) -> None:
    """Raises UserError if the update of an element depends on others of its leaf.

    Args:
      optimizer: takes the keyword `step`.
      params: the leaves to be trained, or their shapes.
    """
    _refuse_other_shapes(optimizer, params)
    rng = np.random.default_rng(0)
    small = jax.tree.map(lambda x: _random(rng, x), params)
    wide = widened(small)  # as a step makes gradients
    trees = (small, *_halves(small))
    states = [optimizer.init(tree) for tree in trees]
    for step, scale in enumerate(_SCALES):
        grads = _gradients(rng, wide, scale)
        updates = []
        for i, (g, p) in enumerate(zip((grads, *_halves(grads)), trees, strict=True)):
            update, states[i] = optimizer.update(g, states[i], p, step=jnp.int32(step))
            updates.append(update)
        _compare(*updates)


def _compare(whole: PyTree, first: PyTree, second: PyTree) -> None:
    halves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    for (name, leaf), (a, b) in zip(named_leaves(whole), halves, strict=True):
        expected = np.asarray(cut(leaf, 2), np.float64) if leaf.ndim else np.asarray(leaf)
        found = np.stack([a.reshape(-1), b.reshape(-1)]) if leaf.ndim else np.asarray(a)
        if not np.allclose(found, expected, rtol=1e-4, atol=1e-7, equal_nan=True):
            raise _not_elementwise(name)


def _refuse_other_shapes(optimizer: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """State that is neither a scalar nor shaped as its leaf cannot be cut as the leaf is."""

    def halved(params: PyTree) -> PyTree:
        return optimizer.init(jax.tree.map(lambda x: all_shares(x, 2), params))

    whole = named_leaves(jax.eval_shape(optimizer.init, params))
    for (name, a), (_, b) in zip(whole, named_leaves(jax.eval_shape(halved, params)), strict=True):
        if a.ndim != b.ndim or (a.ndim and (a.size + 1) // 2 * 2 != b.size):
            raise _not_elementwise(name)


def _not_elementwise(name: str) -> UserError:
    return UserError(
        f"optimizer: the update of {name} is not made element by element, so its state cannot be "
        "sharded; expected sgd, momentum, adam, adamw, lion or the like (not adafactor, LAMB, Muon "
        "or a clip inside the chain: clip by clip_norm), or no sharding"
    )


def _random(rng: np.random.Generator, like: jax.Array) -> jax.Array:
    shape = [min(length, _MOST) for length in like.shape]
    return jnp.asarray(rng.normal(size=shape), like.dtype)


def _gradients(rng: np.random.Generator, like: PyTree, scale: float) -> PyTree:
    """Random ones times `scale`; if that is NaN, with a NaN in the first element alone."""
    grads = jax.tree.map(lambda x: _random(rng, x), like)
    if np.isfinite(scale):
        return jax.tree.map(lambda g: g * jnp.asarray(scale, g.dtype), grads)
    leaves, structure = jax.tree.flatten(grads)
    biggest = max(range(len(leaves)), key=lambda i: leaves[i].size)
    flat = leaves[biggest].reshape(-1).at[0].set(jnp.nan)
    leaves[biggest] = flat.reshape(leaves[biggest].shape)
    return jax.tree.unflatten(structure, leaves)


def _halves(tree: PyTree) -> list[PyTree]:
    """The shares of two devices."""
    return [shares_of(tree, rank, 2) for rank in (0, 1)]

"""Replicas are equal to the bit, also where each computes the sum itself: the fence.

Bare arguments show nothing: a compiler contracts a multiply that precedes the collective into the
collective's own add, on the rank that has the product at hand and not on the others.
"""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import all_reduce_sync, make_train_step
from jaxdp.collectives import ALGORITHMS, all_reduce
from jaxdp.mesh import AXIS

# no multiply twice: one that has two uses is computed apart, and not contracted
PREPARED = {
    "bare": lambda a, b: a,
    "scaled": lambda a, b: a * jnp.asarray(0.123, a.dtype),
    "product": lambda a, b: a * b,
    "clipped": lambda a, b: jnp.clip(a + b, -0.5, 0.5) * jnp.asarray(0.7, a.dtype),
    "concatenated": lambda a, b: jnp.concatenate([a * a, b * jnp.asarray(3.1, a.dtype), b * b]),
}
# the result feeds a multiply, which could be contracted with the collective's last add
USED = {"alone": lambda y: y, "used": lambda y: y.astype(jnp.float32) * 0.3 + 1.7}


def differing(y):
    """The share of elements that are not the same bits on every rank."""
    bits = y.view(f"uint{y.itemsize * 8}")
    return (bits != bits[0]).any(0).mean()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replicas_are_equal_to_the_bit(algorithm, on_ranks, rng, few):
    cases = few([(p, u) for p in PREPARED for u in USED], 3)
    for n, dtype in few([(n, d) for n in (3, 4, 8) for d in (np.float32, jnp.bfloat16)], 1):
        a, b = (rng.normal(size=(n, 1003)).astype(dtype) for _ in range(2))
        results = on_ranks(
            lambda a, b: [
                USED[u](all_reduce(PREPARED[p](a, b), AXIS, algorithm=algorithm)) for p, u in cases
            ],
            a,
            b,
        )
        for case, y in zip(cases, results, strict=True):
            assert differing(y) == 0, (n, dtype, case)


def test_the_fence_is_needed(on_ranks, rng, monkeypatch):
    a, b = (rng.normal(size=(4, 1003)).astype(np.float32) for _ in range(2))

    def reduce_all(a, b):
        return {p: all_reduce(f(a, b), AXIS, algorithm="recursive_doubling")
                for p, f in PREPARED.items()}  # fmt: skip

    fenced = {p: differing(y) for p, y in on_ranks(reduce_all, a, b).items()}
    assert not any(fenced.values())
    monkeypatch.setattr(import_module("jaxdp.collectives.execute"), "fence", lambda x: x)
    bare = {p: differing(y) for p, y in on_ranks(reduce_all, a, b).items()}
    assert bare["bare"] == 0
    # once these agree, the compiler no longer contracts and the fence can be measured anew
    assert min(bare["scaled"], bare["clipped"], bare["concatenated"]) > 0.01, bare


@pytest.mark.parametrize("n", [3, 4, 8])
def test_law_2_in_whole_train_steps(n, mesh_of, rng):
    def loss(params, model_state, batch, keys):
        hidden = jnp.tanh(batch["x"] @ params["a"]) * 0.37
        return ((hidden @ params["b"] - batch["y"]) ** 2).sum(), jnp.float32(len(batch["x"]))

    sync = all_reduce_sync("recursive_doubling")
    step = make_train_step(loss, optax.adam(0.01), sync, mesh_of(n), microbatches=2, clip_norm=0.5)
    shapes = {"a": (29, 31), "b": (31, 7)}
    state = step.init({k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()})
    for _ in range(3):
        x, y = rng.normal(size=(48, 29)), rng.normal(size=(48, 7))
        state, _ = step(state, step.place({"x": np.float32(x), "y": np.float32(y)}))
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        first, *others = (np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
        assert len(others) == n - 1
        assert all(other == first for other in others)

"""A decoder-only transformer: pre-norm, tied embeddings, no biases.

Written for XLA:CPU as well as for accelerators: dense layers see `[batch * time, features]`,
attention is an einsum on `[batch, heads, time, features]`.

References: Radford et al., Language Models are Unsupervised Multitask Learners, 2019;
Press and Wolf, Using the Output Embedding to Improve Language Models, 2017 (tied embeddings).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.models.layers import RMSNorm, dropout, rotate


def dense(inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    """A dense layer without bias; the variance of its weights is scale² / inputs."""
    init = nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


def causal_attention(q_BxHxTxK: jax.Array, k_BxHxTxK: jax.Array, v_BxHxTxK: jax.Array):
    """softmax(q kᵀ / sqrt(K)) v, each position seeing itself and what comes before it.

    The sum is divided after the product with v, where rows are short; XLA:CPU runs the backward of
    this form in half the time that it needs for `jax.nn.softmax` (jax 0.10.2).
    """
    t, features = q_BxHxTxK.shape[-2:]
    scores = jnp.einsum("bhtk,bhsk->bhts", q_BxHxTxK * features**-0.5, k_BxHxTxK)
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    seen_TxS = jnp.tril(jnp.ones((t, t), bool))
    wide = jnp.where(seen_TxS[None, None], wide, jnp.finfo(wide.dtype).min)
    weights = jnp.exp(wide - jax.lax.stop_gradient(wide.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    mixed = jnp.einsum("bhts,bhsk->bhtk", weights.astype(scores.dtype), v_BxHxTxK)
    return mixed / total.astype(scores.dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); both outputs start 1/sqrt(2 layers) small."""

    def __init__(self, width: int, heads: int, layers: int, rotary: bool, rngs: nnx.Rngs):
        small = (2 * layers) ** -0.5
        self.norm_attention, self.norm_mlp = RMSNorm(width), RMSNorm(width)
        self.qkv = dense(width, 3 * width, rngs)
        self.attention_out = dense(width, width, rngs, small)
        self.mlp_in = dense(width, 4 * width, rngs)
        self.mlp_out = dense(4 * width, width, rngs, small)
        self.heads, self.rotary = heads, rotary

    def attend(self, x_NxD: jax.Array, b: int) -> jax.Array:
        """Attention of rows `[b * t, d]` that are b examples of t positions."""
        n, d = x_NxD.shape
        qkv = self.qkv(self.norm_attention(x_NxD)).reshape(b, n // b, 3, self.heads, -1)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        mixed_BxHxTxK = causal_attention(q, k, v)
        return self.attention_out(mixed_BxHxTxK.transpose(0, 2, 1, 3).reshape(n, d))

    def mlp(self, x_NxD: jax.Array) -> jax.Array:
        return self.mlp_out(jax.nn.gelu(self.mlp_in(self.norm_mlp(x_NxD))))


class GPT(nnx.Module):
    """Tokens `[b, t]` -> logits `[b, t, vocabulary]`, t at most `context`.

    Args:
      context: the longest input.
      vocabulary: how many tokens there are.
      layers, width, heads: the size; width is a multiple of heads.
      rate: dropout of the embeddings and of each residual branch.
      positions: "learned" adds a vector per position, "rotary" turns queries and keys.
      remat: keep each block's input alone for the backward pass, which computes the rest again.
    """

    def __init__(
        self,
        context: int,
        vocabulary: int,
        layers: int,
        width: int,
        heads: int,
        rate: float,
        positions: str,
        remat: bool,
        rngs: nnx.Rngs,
    ):
        normal = nnx.initializers.normal(0.02, jnp.float32)
        rotary = positions == "rotary"
        self.embedding = nnx.Param(normal(rngs.params(), (vocabulary, width)))
        if not rotary:
            self.positions = nnx.Param(normal(rngs.params(), (context, width)))
        self.blocks = nnx.Dict(
            {f"{i:02d}": Block(width, heads, layers, rotary, rngs) for i in range(layers)}
        )
        self.norm_out = RMSNorm(width)
        self.rotary, self.rate, self.remat = rotary, rate, remat

    def __call__(self, tokens_BxT: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        b, t = tokens_BxT.shape
        embedding_VxD = self.embedding[...]

        def drop(x_NxD, layer):
            return dropout(x_NxD.reshape(b, -1), self.rate, keys_B, layer).reshape(x_NxD.shape)

        x_BxTxD = embedding_VxD[tokens_BxT]
        if not self.rotary:
            x_BxTxD += self.positions[...][None, :t]
        x_NxD = drop(x_BxTxD.reshape(b * t, -1), 0)

        def apply(block, x_NxD, i):
            x_NxD += drop(block.attend(x_NxD, b), 2 * i + 1)
            return x_NxD + drop(block.mlp(x_NxD), 2 * i + 2)

        blocks = [block for _, block in sorted(self.blocks.items())]
        if self.remat:
            x_NxD = _rematerialised(apply, blocks, x_NxD)
        else:
            for i, block in enumerate(blocks):
                x_NxD = apply(block, x_NxD, i)
        return (self.norm_out(x_NxD) @ embedding_VxD.T).reshape(b, t, -1)


def _rematerialised(
    apply: Callable[[Block, jax.Array, Any], jax.Array], blocks: list[Block], x_NxD: jax.Array
) -> jax.Array:
    """The blocks one after the other, of which only the inputs are kept for the backward pass.

    A loop over blocks, not one `jax.checkpoint` after the other: XLA:CPU drops their barriers (jax
    0.10.2; 0.12 keeps them), computes all blocks again at once, and saves no memory.

    References: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    graph = nnx.graphdef(blocks[0])
    states = [nnx.state(block) for block in blocks]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    @partial(jax.checkpoint, prevent_cse=False)  # nothing is merged across a loop's body
    def one(x_NxD: jax.Array, block: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        state, i = block
        return apply(nnx.merge(graph, state), x_NxD, i), None

    return jax.lax.scan(one, x_NxD, (stacked, jnp.arange(len(blocks))))[0]

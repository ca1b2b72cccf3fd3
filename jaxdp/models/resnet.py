"""A residual network for small images, the one of the CIFAR experiments.

    stem 3x3, then stages of `blocks` blocks; a stage after the first halves height and width
    block:  x + BN(conv(ReLU(BN(conv(x)))))  then ReLU; where the shape changes, x is projected
    mean over positions, logits

References: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.models.batch_norm import BatchNorm, Mode


class ResNet(nnx.Module):
    """See the module.

    Args:
      depth: channels of an image.
      num_classes: how many logits.
      channels: of each stage.
      blocks: per stage; 6 `blocks` + 2 layers where there are three stages.
      batch_norm: "sync" or "local", see `batch_norm`.
    """

    def __init__(
        self,
        depth: int,
        num_classes: int,
        channels: Sequence[int],
        blocks: int,
        batch_norm: Mode,
        rngs: nnx.Rngs,
    ):
        self.stem = _ConvNorm(depth, channels[0], 3, 1, batch_norm, rngs)
        self.blocks = nnx.Dict({})
        inputs = channels[0]
        for stage, outputs in enumerate(channels):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                self.blocks[f"{stage}.{block}"] = _Block(inputs, outputs, stride, batch_norm, rngs)
                inputs = outputs
        self.logits = nnx.Linear(inputs, num_classes, rngs=rngs)

    def __call__(
        self, x_BxHxWxC: jax.Array, keys_B: jax.Array | None, weight_B: jax.Array | None
    ) -> jax.Array:
        training = keys_B is not None
        x_BxHxWxC = jax.nn.relu(self.stem(x_BxHxWxC, weight_B, training))
        for _, block in sorted(self.blocks.items()):
            x_BxHxWxC = block(x_BxHxWxC, weight_B, training)
        return self.logits(x_BxHxWxC.mean((1, 2)))


class _ConvNorm(nnx.Module):
    """A convolution without bias, which the normalisation would remove, and the normalisation."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int, batch_norm: Mode, rngs: nnx.Rngs
    ):
        self.convolution = nnx.Conv(
            inputs, outputs, (size, size), strides=stride, use_bias=False, rngs=rngs
        )
        self.norm = BatchNorm(outputs, batch_norm)

    def __call__(self, x: jax.Array, weight_B: jax.Array | None, training: bool) -> jax.Array:
        return self.norm(self.convolution(x), weight_B, training)


class _Block(nnx.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: Mode, rngs: nnx.Rngs):
        self.first = _ConvNorm(inputs, outputs, 3, stride, batch_norm, rngs)
        self.second = _ConvNorm(outputs, outputs, 3, 1, batch_norm, rngs)
        # the block begins as the identity, which trains better (Goyal et al., 2017, section 5.1)
        self.second.norm.scale[...] = jnp.zeros(outputs, jnp.float32)
        self.projects = stride != 1 or inputs != outputs
        if self.projects:
            self.projection = _ConvNorm(inputs, outputs, 1, stride, batch_norm, rngs)

    def __call__(self, x: jax.Array, weight_B: jax.Array | None, training: bool) -> jax.Array:
        y = jax.nn.relu(self.first(x, weight_B, training))
        y = self.second(y, weight_B, training)
        return jax.nn.relu(y + (self.projection(x, weight_B, training) if self.projects else x))

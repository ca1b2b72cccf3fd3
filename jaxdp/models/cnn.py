"""A small convolutional network for small images."""

from collections.abc import Sequence

import jax
from flax import nnx

from jaxdp.models.layers import dropout, max_pool_2x2


class CNN(nnx.Module):
    """Blocks of (3x3 convolution, ReLU, 2x2 max-pool), one hidden dense layer, logits.

    Args:
      shape: (height, width, channels) of an image.
      num_classes: how many logits.
      channels: outputs of each block's convolution; each block halves height and width.
      hidden: width of the dense layer.
      rate: dropout before each of the two dense layers.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_classes: int,
        channels: Sequence[int],
        hidden: int,
        rate: float,
        rngs: nnx.Rngs,
    ):
        height, width, depth = shape
        self.convolutions = nnx.Dict({})
        for i, outputs in enumerate(channels):
            self.convolutions[f"{i:02d}"] = nnx.Conv(depth, outputs, (3, 3), rngs=rngs)
            height, width, depth = height // 2, width // 2, outputs
        self.hidden = nnx.Linear(height * width * depth, hidden, rngs=rngs)
        self.logits = nnx.Linear(hidden, num_classes, rngs=rngs)
        self.rate = rate

    def __call__(self, x_BxHxWxC: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        for _, convolution in sorted(self.convolutions.items()):
            # max(relu(x)) = relu(max(x)), and four times fewer ReLUs
            x_BxHxWxC = jax.nn.relu(max_pool_2x2(convolution(x_BxHxWxC)))
        x_BxD = dropout(x_BxHxWxC.reshape(len(x_BxHxWxC), -1), self.rate, keys_B, 0)
        x_BxD = dropout(jax.nn.relu(self.hidden(x_BxD)), self.rate, keys_B, 1)
        return self.logits(x_BxD)

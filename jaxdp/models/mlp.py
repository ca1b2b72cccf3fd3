"""A multilayer perceptron."""

from collections.abc import Sequence

import jax
from flax import nnx

from jaxdp.models.layers import dropout


class MLP(nnx.Module):
    """Flattens its inputs; hidden layers of (dense, GELU, dropout); logits.

    GELU is smooth.  With ReLU, a value within rounding of 0 takes either branch, and float32 runs
    on 1 and N devices, whose sums round differently, may part by one example's gradient.

    Args:
      inputs: features of one flattened example.
      num_classes: how many logits.
      hidden: widths of the hidden layers, none for a linear classifier.
      rate: dropout after each hidden layer.
    """

    def __init__(
        self, inputs: int, num_classes: int, hidden: Sequence[int], rate: float, rngs: nnx.Rngs
    ):
        widths = [inputs, *hidden]
        self.hidden = nnx.Dict(
            {
                f"{i:02d}": nnx.Linear(widths[i], widths[i + 1], rngs=rngs)
                for i in range(len(hidden))
            }
        )
        self.logits = nnx.Linear(widths[-1], num_classes, rngs=rngs)
        self.rate = rate

    def __call__(self, x_Bx: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        x_BxD = x_Bx.reshape(len(x_Bx), -1)
        for i, (_, dense) in enumerate(sorted(self.hidden.items())):
            x_BxD = dropout(jax.nn.gelu(dense(x_BxD)), self.rate, keys_B, i)
        return self.logits(x_BxD)

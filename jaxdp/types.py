"""The few types that every floor shares."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

PyTree = Any
Batch = Mapping[str, Any]
Device = Any  # a jax.Device, which type checkers take for a variable


class LossOut(NamedTuple):
    """What a loss returns: sums, never means.

    Sums and weights are added over microbatches and devices and divided once, by the global weight,
    so that a device with one token and a device with nine give the mean over ten tokens.

    Attributes:
      sum: scalar float, the loss summed over examples (or tokens).
      weight: scalar float, how many examples (or tokens) that sum holds.
      metrics: name -> (sum, weight), each a scalar float, reported as sum / weight.
      model_state: the new state of the model, such as batch statistics; None leaves it as it was.
    """

    sum: jax.Array
    weight: jax.Array
    metrics: Mapping[str, tuple[jax.Array, jax.Array]] = {}
    model_state: PyTree = None


# loss_fn(params, model_state, batch, keys) -> LossOut, or a plain (sum, weight).
# `keys` holds one random key per example of `batch`, shape [b], or is None in evaluation.
LossFn = Callable[[PyTree, PyTree, Batch, Any], Any]


class Model(NamedTuple):
    """A network as two pure functions.

    Attributes:
      init: key -> (params, model_state), both nested dicts of arrays; params are float32.
      apply: (params, model_state, inputs, keys) -> (outputs, model_state).  `inputs` is
        `[b, ...]`; `keys` holds one random key per example, or is None in evaluation, when nothing
        is random and the model state stays as it is.  The network computes in the dtype of its
        params; outputs are float32.
      weighted: `apply` takes the examples' weights `[b]` as a fifth argument, for statistics of
        the batch: examples of weight 0 are outside them.
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[..., tuple[jax.Array, PyTree]]
    weighted: bool = False

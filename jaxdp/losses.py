"""Losses: sums and weights, never means (see `jaxdp.types.LossOut`).

An example of weight 0 is as good as absent: what its arrays hold, NaN included, reaches neither the
loss nor a gradient.  Multiplying by 0 would not do (0 * NaN is NaN), so its inputs are replaced by
zeros before the network sees them.
"""

import math

import jax
import jax.numpy as jnp

from jaxdp.errors import UserError
from jaxdp.types import Batch, LossFn, LossOut, Model


def classification_loss(model: Model, label_smoothing: float = 0.0) -> LossFn:
    """Cross entropy of one label per example.

        sum_i w_i [ (1 - ε) (-log p_i[label_i])  +  ε mean_c (-log p_i[c]) ],    weight sum_i w_i

    Batches hold `inputs` `[b, ...]`, `label` int `[b]`, and may hold `weight` float `[b]`.

    Args:
      model: maps inputs to logits `[b, classes]`.
      label_smoothing: ε, in [0, 1).

    Returns:
      A loss with the metric `accuracy`.

    References: Szegedy et al., Rethinking the Inception Architecture, 2016 (label smoothing).
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise UserError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")

    def loss_fn(params, model_state, batch, keys):
        inputs, label_B = _field(batch, "inputs"), _field(batch, "label")
        weight_B = batch.get("weight", jnp.ones(len(label_B), jnp.float32))
        inputs, label_B = _blank(inputs, weight_B), _blank(label_B, weight_B)
        logits_BxC, model_state = _apply(model, params, model_state, inputs, keys, weight_B)
        nats_B, correct_B = _cross_entropy(logits_BxC, label_B, label_smoothing)
        weight = jnp.sum(weight_B)
        metrics = {"accuracy": (jnp.sum(correct_B * weight_B), weight)}
        return LossOut(jnp.sum(nats_B * weight_B), weight, metrics, model_state)

    return loss_fn


def language_loss(model: Model, bits_name: str = "bits_per_byte") -> LossFn:
    """Cross entropy of each token given those before it.

    Batches hold `tokens` int `[b, t + 1]`, and may hold `weight` float `[b]` and `mask` `[b, t]`,
    the weight of predicting `tokens[:, 1:]`; where both are given they are multiplied.

    Args:
      model: maps tokens `[b, t]` to logits `[b, t, vocabulary]`.
      bits_name: the name of the metric that counts bits per token; a token is one byte in the
        data sets of bytes.

    Returns:
      A loss in nats, its weight counted in tokens, with the metrics `bits_name` and `accuracy`.
    """

    def loss_fn(params, model_state, batch, keys):
        tokens = _field(batch, "tokens")
        weight_B = batch.get("weight", jnp.ones(len(tokens), jnp.float32))
        tokens = _blank(tokens, weight_B)
        weight_BxT = weight_B[:, None] * batch.get("mask", jnp.ones_like(tokens[:, 1:]))
        logits_BxTxV, model_state = _apply(
            model, params, model_state, tokens[:, :-1], keys, weight_B
        )
        targets_BxT = jnp.where(weight_BxT > 0, tokens[:, 1:], 0)
        nats_BxT, correct_BxT = _cross_entropy(logits_BxTxV, targets_BxT)
        nats, weight = jnp.sum(nats_BxT * weight_BxT), jnp.sum(weight_BxT)
        metrics = {
            bits_name: (nats / math.log(2.0), weight),
            "accuracy": (jnp.sum(correct_BxT * weight_BxT), weight),
        }
        return LossOut(nats, weight, metrics, model_state)

    return loss_fn


def _apply(model: Model, params, model_state, inputs, keys, weight_B: jax.Array):
    weight = (weight_B,) if model.weighted else ()
    return model.apply(params, model_state, inputs, keys, *weight)


def _field(batch: Batch, name: str) -> jax.Array:
    if name not in batch:
        raise UserError(f"the loss needs {name!r} in each batch; the data gives {sorted(batch)}")
    return batch[name]


def _blank(x_Bx: jax.Array, weight_B: jax.Array) -> jax.Array:
    """Zeros in place of the examples of weight 0."""
    used_Bx = (weight_B > 0).reshape(-1, *[1] * (x_Bx.ndim - 1))
    return jnp.where(used_Bx, x_Bx, jnp.zeros_like(x_Bx))


def _cross_entropy(logits_xC, label_x, smoothing: float = 0.0):
    """Nats and correctness (0 or 1) of each label."""
    log_p_xC = jax.nn.log_softmax(logits_xC)
    nats_x = -jnp.take_along_axis(log_p_xC, label_x[..., None], -1)[..., 0]
    if smoothing:
        nats_x = (1.0 - smoothing) * nats_x - smoothing * jnp.mean(log_p_xC, -1)
    return nats_x, (jnp.argmax(logits_xC, -1) == label_x).astype(nats_x.dtype)

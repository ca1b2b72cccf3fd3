"""Optimizers whose learning rate follows the steps of training.

A skipped step (non-finite gradients) advances the data and the schedule but not the optimizer, so
the rate cannot come from a count that lives in the optimizer's state, as optax has it.  The last
link of each chain takes the step as an argument instead:

    updates, state = optimizer.update(grads, state, params, step=step)
"""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.errors import UserError
from jaxdp.types import PyTree

Schedule = Callable[[Any], jax.Array]

# progress in [0, 1] after the warm-up -> what is left of the way from the peak to the end
DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "constant": jnp.ones_like,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + jnp.cos(math.pi * progress)),
}


def build_schedule(
    schedule: str,
    *,
    learning_rate: float,
    steps: int,
    warmup_steps: int = 0,
    end_fraction: float = 0.0,
) -> Schedule:
    """The learning rate as a function of the step of training, counted from 0.

        step s < warmup_steps:  learning_rate * (s + 1) / warmup_steps     (never a step of rate 0)
        then, to step `steps`:  from learning_rate to end_fraction * learning_rate, and stays there

    Args:
      schedule: "constant", "linear" or "cosine".
      learning_rate: the peak.
      steps: the length of the training, in optimizer steps.
      warmup_steps: how many of them warm up.
      end_fraction: the last rate as a fraction of the peak.

    Returns:
      int scalar -> float32 scalar, traceable.

    Raises:
      UserError: an unknown schedule, numbers that make none, or an option without effect.

    References: Loshchilov and Hutter, SGDR, 2017 (cosine).
    """
    _check_schedule(schedule, learning_rate, steps, warmup_steps, end_fraction)
    decay = DECAYS[schedule]

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        warmup = jnp.minimum(1.0, (step + 1.0) / max(1, warmup_steps))
        progress = jnp.clip((step - warmup_steps) / float(steps - warmup_steps), 0.0, 1.0)
        left = end_fraction + (1.0 - end_fraction) * decay(progress)
        return learning_rate * warmup * left

    return rate


def _check_schedule(schedule, learning_rate, steps, warmup_steps, end_fraction):
    if schedule not in DECAYS:
        raise UserError(f"unknown schedule {schedule!r}: choose one of {', '.join(DECAYS)}")
    if not 0.0 < learning_rate < math.inf:
        raise UserError(f"learning_rate must be above 0, got {learning_rate}")
    if not 0 <= warmup_steps < steps:
        raise UserError(
            f"warmup_steps must be at least 0 and below steps, got {warmup_steps} of {steps} steps"
        )
    if not 0.0 <= end_fraction <= 1.0:
        raise UserError(f"end_fraction must be from 0 to 1, got {end_fraction}")
    if schedule == "constant" and end_fraction:
        raise UserError(
            f"end_fraction {end_fraction} has no effect on a constant schedule: "
            "leave it out, or choose linear or cosine"
        )


def scale_by_step_schedule(schedule: Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by -schedule(step); `update` takes the keyword `step`, an int scalar.

    It has no state: the same step gives the same rate, whatever was skipped before.
    """

    def update(updates, state, params=None, *, step, **extra_args):
        del params, extra_args
        rate = -schedule(step)
        # The product in float32 or wider: a rate rounded to bfloat16 is up to 0.4 % off.
        return jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates), state

    # optax's type of `update` has no room for a keyword that is required.
    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        update,  # pyright: ignore[reportArgumentType]
    )


def decay_mask(params: PyTree) -> PyTree:
    """Which leaves decay: kernels and embeddings (two dims or more), not biases and scales."""
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)


def describe_decay(params: PyTree, mask: Callable[[PyTree], PyTree] = decay_mask) -> list[str]:
    """Two lines for the start of a run: which leaves decay and which do not, `*` for a number."""
    groups: dict[bool, dict[str, int]] = {True: {}, False: {}}
    flags = jax.tree.leaves(mask(params))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), decays in zip(leaves, flags, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        name = re.sub(r"\b\d+\b", "*", name)
        groups[decays][name] = groups[decays].get(name, 0) + jnp.size(leaf)
    return [
        f"{label} ({sum(names.values()):,} values): {', '.join(names) or 'none'}"
        for label, names in (("weight decay", groups[True]), ("no weight decay", groups[False]))
    ]


# One row per optimizer: the links before the learning rate.  Each row puts the given links of
# weight decay, none or one, where they belong.
Links = list[optax.GradientTransformation]


def sgd(decay: Links) -> Links:
    """The gradient.  Weight decay is an L2 term added to it, as in PyTorch."""
    return decay


def momentum(decay: Links, momentum: float = 0.9, nesterov: bool = False) -> Links:
    """Heavy-ball or Nesterov momentum.  Weight decay is an L2 term added to the gradient.

    References: Sutskever et al., On the Importance of Initialization and Momentum, 2013.
    """
    return [*decay, optax.trace(momentum, nesterov)]


def adam(decay: Links, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Links:
    """Adam, without weight decay: an L2 term that it rescales is hardly ever what is meant.

    References: Kingma and Ba, Adam, 2015.
    """
    if decay:
        raise UserError("optimizer adam takes no weight_decay: choose adamw, or leave it at 0")
    return [optax.scale_by_adam(b1, b2, eps)]


def adamw(decay: Links, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Links:
    """Adam with decoupled weight decay.

    References: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """
    return [optax.scale_by_adam(b1, b2, eps), *decay]


def lion(decay: Links, b1: float = 0.9, b2: float = 0.99) -> Links:
    """The sign of an interpolated momentum, with decoupled weight decay.

    References: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
    """
    return [optax.scale_by_lion(b1, b2), *decay]


def adafactor(
    decay: Links,
    decay_rate: float = 0.8,
    clipping_threshold: float = 1.0,
    min_dim_size_to_factor: int = 128,
    multiply_by_parameter_scale: bool = True,
) -> Links:
    """Adam's second moment, kept as row and column means where both dims are large enough.

    Steps are relative to a leaf's own size where `multiply_by_parameter_scale`, so that 1e-2 is a
    usual learning rate.  Weight decay is decoupled and, unlike optax's, scaled by that rate.

    References: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory, 2018.
    """
    links = [
        optax.scale_by_factored_rms(
            decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor
        ),
        optax.clip_by_block_rms(clipping_threshold),
    ]
    if multiply_by_parameter_scale:
        links.append(optax.scale_by_param_block_rms())
    return [*links, *decay]


OPTIMIZERS: dict[str, Callable[..., Links]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
}


def build_optimizer(
    kind: str,
    *,
    learning_rate: float,
    steps: int,
    schedule: str = "constant",
    warmup_steps: int = 0,
    end_fraction: float = 0.0,
    weight_decay: float = 0.0,
    decay_mask: Callable[[PyTree], PyTree] = decay_mask,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of the table, with weight decay and a schedule.

    Args:
      kind: a key of `OPTIMIZERS`.
      learning_rate, steps, schedule, warmup_steps, end_fraction: see `build_schedule`.
      weight_decay: for adamw, lion and adafactor decoupled, multiplied by the learning rate; for
        sgd and momentum the L2 term added to the gradient (which for sgd is the same thing).
      decay_mask: params -> pytree of bool, which leaves decay.
      options: those of the row, such as `momentum=0.9` or `b1=0.9`.

    Returns:
      A transformation; `update(grads, state, params, step=step)` needs the step of training.

    Raises:
      UserError: an unknown kind or option, weight decay for adam, a wrong schedule.
    """
    if kind not in OPTIMIZERS:
        raise UserError(f"unknown optimizer {kind!r}: choose one of {', '.join(OPTIMIZERS)}")
    known = list(inspect.signature(OPTIMIZERS[kind]).parameters)[1:]
    if unknown := sorted(options.keys() - known):
        raise UserError(
            f"optimizer {kind} has no option {', '.join(unknown)}; "
            f"its options: {', '.join(known) or 'none'}"
        )
    if not 0.0 <= weight_decay < math.inf:
        raise UserError(f"weight_decay must be 0 or more, got {weight_decay}")
    decay = [optax.add_decayed_weights(weight_decay, decay_mask)] if weight_decay else []
    rate = build_schedule(
        schedule,
        learning_rate=learning_rate,
        steps=steps,
        warmup_steps=warmup_steps,
        end_fraction=end_fraction,
    )
    return optax.chain(*OPTIMIZERS[kind](decay, **options), scale_by_step_schedule(rate))

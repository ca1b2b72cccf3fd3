"""Is a step on N devices the step on one in the types in which the training computes?

Rounding hides here what float64 shows, but a reduction may be right in float64 alone: one that
rounds or overflows.  The deviation may be what rounding explains, and no more.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxdp.checking.equality import Deviation, cause, largest, rounding, updates
from jaxdp.checking.lines import Line
from jaxdp.checking.narrow import narrowest, permuted
from jaxdp.checking.subject import Subject
from jaxdp.mesh import data_mesh
from jaxdp.state import TrainState
from jaxdp.steps import TrainStep
from jaxdp.types import Batch, Device

NAME = "precision"
_LEAF = 1e-2  # of the whole gradient's norm: a smaller leaf's may be rounding alone in 16 bits
_HALVINGS = 24  # of a loss scale, at most
# so large that the update's rounding is the gradient's, not that of the parameter it is added to
RATE: dict[str, Any] = {"optimizer": optax.sgd(2.0**20), "clip_norm": None}


def precision(subject: Subject, devices: Sequence[Device], exact_is_right: bool) -> Line:
    """A step of SGD in the training's own types.

    Args:
      exact_is_right: whether the gradient is right in float64, so that a fault here is one of
        rounding.
    """
    one, n = _updates(subject, devices[:1]), len(devices)
    found = largest(one, _updates(subject, devices), _LEAF)
    dtype = narrowest(subject, devices[0], wide=False)
    if not found.moved:
        return Line(NAME, "fail", f"in {dtype}: no parameter changed, or not to a finite value")
    text = f"as it trains, in {dtype}: largest deviation {found.worst:.1e} ({found.leaf})"
    if found.worst <= (least := rounding(dtype, noise=0)):
        return Line(NAME, "pass", f"{text}; rounding explains {least:.1e}")
    mixed = _updates(subject, devices[:1], loss_fn=permuted(subject.loss_fn))
    noise = largest(one, mixed, _LEAF).worst
    text += f"; another order of examples on one device makes {noise:.1e}"
    if found.worst <= rounding(dtype, noise):
        return Line(NAME, "pass", text)
    return Line(NAME, "fail", f"{text}; likely {_cause(found, n, exact_is_right)}")


def _cause(found: Deviation, n: int, exact_is_right: bool) -> str:
    if not exact_is_right:
        return "what 'gradients' says"
    if not np.isfinite(found.worst):
        return cause(found, n)
    return "a reduction that rounds or overflows in the training's types, and not in float64"


def _updates(subject: Subject, devices: Sequence[Device], **changes: Any) -> dict[str, np.ndarray]:
    """The update of a step of SGD, by leaf."""
    if subject.exact_sync is not None:
        changes["sync"] = subject.exact_sync
    step = subject.make_step(mesh=data_mesh(devices), **RATE, **changes)
    batch = subject.batch(0)
    first = settled(step, subject, batch)
    start = jax.device_get(_learned(first))
    state, _ = step(first, step.place(batch))
    return updates(start, jax.device_get(_learned(state)))


def _learned(state: TrainState) -> dict[str, Any]:
    return {"params": state.params, "model_state": state.model_state}


def settled(step: TrainStep, subject: Subject, batch: Batch) -> TrainState:
    """The first state; its loss scale, if it has one, such that `batch` does not overflow.

    A scale begins too high and is halved by the first steps, which change nothing else.
    """
    first = step.init(*subject.init())
    if not first.loss_scale:
        return first
    for _ in range(_HALVINGS):
        before = int(first.loss_scale.overflows)
        state, _ = step(first, step.place(batch))
        scale = state.loss_scale
        first = step.init(*subject.init())._replace(loss_scale=scale)
        if int(scale.overflows) == before:
            break
    return first

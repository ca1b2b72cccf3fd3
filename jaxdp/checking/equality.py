"""Is a step on N devices the step on one?  In float64, where no mistake hides in rounding.

The devices compute the same microbatches of the same examples with the same random keys, so that
nothing but the order of additions may differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxdp.checking.lines import Line
from jaxdp.checking.subject import Subject
from jaxdp.mesh import data_mesh
from jaxdp.trees import named_leaves
from jaxdp.types import Batch, Device, PyTree

NAMES = ("gradients", "weights", "optimizer")
EXACT = 1e-9  # relative; additions in another order differ by 1e-15 to 1e-12
SINGLE = 1e-4  # where something computes in float32 whatever the parameters are
_OPTIMIZER_STEPS = 3
_FLOOR = 1e-6  # of the whole update's norm: leaves whose gradient is rounding alone are no evidence


class Deviation(NamedTuple):
    """The leaf whose update differs most.

    Attributes:
      worst: norm of the difference over the norm of the update.
      leaf: its path.
      one, many: the norm of its update on one device and on many.
      ratio: the factor between them that fits best.
      moved: whether one device changed anything at all.
    """

    worst: float
    leaf: str
    one: float
    many: float
    ratio: float
    moved: bool


def gradients(subject: Subject, devices: Sequence[Device]) -> Line:
    """One step of SGD with rate 1, all weights 1: the update is the gradient."""
    found = _sgd(subject, devices, subject.batch)
    line = _line("gradients", found, len(devices), "a step of SGD", _cause)
    if subject.exact_sync is None:
        return line
    rounded = _sgd(replace(subject, exact_sync=None), devices, subject.batch)
    chosen = f"; without rounding on the wire, which by choice makes it {rounded.worst:.1e}"
    return line._replace(detail=line.detail + chosen)


def weights(subject: Subject, devices: Sequence[Device], equal_is_right: bool) -> Line:
    """The same with weights from 0 to 4, and a quarter of the examples masked.

    Args:
      equal_is_right: whether equal weights gave the right gradients, so that a fault here is one
        of the weights.
    """
    name = "weights"
    if not _reads_weights(subject, devices[:1]):
        return Line(name, "n/a", "the loss does not read batch['weight']")

    def cause(found: Deviation, n: int) -> str:
        if not equal_is_right:
            return "what 'gradients' says"
        return (
            "a mean of means: the loss must return the sum over its examples and the weight it "
            "holds, not a mean and 1"
        )

    found = _sgd(subject, devices, subject.weighted)
    return _line(name, found, len(devices), "SGD, weights 0 to 4, a quarter masked", cause)


def optimizer(subject: Subject, devices: Sequence[Device]) -> Line:
    """A few steps with the training's own optimizer."""
    with jax.enable_x64(True):
        one, many = (
            _train(subject, some, [subject.weighted(t) for t in range(_OPTIMIZER_STEPS)])
            for some in (devices[:1], devices)
        )
    found = compare(one, many)
    what = f"{_OPTIMIZER_STEPS} steps with its own optimizer"
    return _line("optimizer", found, len(devices), what, _cause)


def compare(one: tuple[PyTree, PyTree], many: tuple[PyTree, PyTree]) -> Deviation:
    """The largest deviation between two (start, end), of the same start."""
    start, end = (dict(named_leaves(tree)) for tree in one)
    other = dict(named_leaves(many[1]))
    updates = {name: np.asarray(end[name]) - np.asarray(start[name]) for name in end}
    others = {name: np.asarray(other[name]) - np.asarray(start[name]) for name in end}
    whole = np.sqrt(sum(float(np.vdot(x, x)) for x in updates.values()))

    def of_leaf(name: str) -> Deviation:
        a, b = updates[name], others[name]
        norm, scale = float(np.linalg.norm(a)), max(float(np.linalg.norm(a)), _FLOOR * whole)
        difference = float(np.linalg.norm(b - a))
        if not np.isfinite(difference):
            worst = np.inf
        else:
            worst = difference / scale if scale else difference
        ratio = float(np.vdot(a, b)) / norm**2 if norm else np.nan
        return Deviation(worst, name, norm, float(np.linalg.norm(b)), ratio, whole > 0)

    return max((of_leaf(name) for name in updates), key=lambda found: found.worst)


def _sgd(subject: Subject, devices: Sequence[Device], batch: Callable[[int], Batch]) -> Deviation:
    rate_one = {"optimizer": optax.sgd(1.0), "clip_norm": None}
    with jax.enable_x64(True):
        one, many = (
            _train(subject, some, [batch(0)], **rate_one) for some in (devices[:1], devices)
        )
    return compare(one, many)


def _train(
    subject: Subject, devices: Sequence[Device], batches: Sequence[Batch], **changes: Any
) -> tuple[PyTree, PyTree]:
    """(parameters and model state at the start, at the end), in float64."""
    if subject.exact_sync is not None:
        changes["sync"] = subject.exact_sync
    step = subject.make_step(mesh=data_mesh(devices), compute_dtype=None, **changes)
    params, model_state = jax.tree.map(lambda x: np.asarray(x, np.float64), subject.init())
    state = step.init(params, model_state)
    for batch in batches:
        state, _ = step(state, step.place(batch))
    end = {"params": state.params, "model_state": state.model_state}
    return {"params": params, "model_state": model_state}, jax.device_get(end)


def _reads_weights(subject: Subject, device: Sequence[Device]) -> bool:
    rate_one = {"optimizer": optax.sgd(1.0), "clip_norm": None}
    plain, other = (
        _train(subject, device, [batch], **rate_one)
        for batch in (subject.batch(0), subject.weighted(0))
    )
    return compare(plain, other).worst > SINGLE


def _line(
    name: str,
    found: Deviation,
    n: int,
    what: str,
    cause: Callable[[Deviation, int], str],
) -> Line:
    if not found.moved:
        detail = f"{what}: no parameter changed; the loss is not finite, or its weight is 0"
        return Line(name, "fail", detail)
    if found.worst <= EXACT:
        return Line(name, "pass", f"{what}: largest deviation {found.worst:.1e} ({found.leaf})")
    if found.worst <= SINGLE:
        return Line(
            name,
            "pass",
            f"{what}: largest deviation {found.worst:.1e} ({found.leaf}); not float64's: something "
            "computes in lower precision",
        )
    return Line(
        name,
        "fail",
        f"{what}: {found.leaf} is off by {found.worst:.1e}: update of norm {found.one:.6g} on one "
        f"device, {found.many:.6g} on {n}; likely {cause(found, n)}",
    )


def _cause(found: Deviation, n: int) -> str:
    if not np.isfinite(found.worst):
        return "a value that is not finite on some devices"
    if found.ratio and abs(found.ratio - n) < 0.01 * n:
        return f"a sum over the {n} devices where their mean is wanted"
    if abs(found.ratio * n - 1) < 0.01:
        return f"a gradient divided by {n} twice"
    if found.many == 0:
        return "a leaf that is not updated"
    return (
        "a reduction that is missing, statistics of each device's own part (model.batch_norm "
        "local), or random numbers that depend on the place of an example"
    )

"""Is a step on N devices the step on one?  In float64, where no mistake hides in rounding.

The devices compute the same microbatches of the same examples with the same random keys, so that
nothing but the order of additions may differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.checking.lines import Line
from jaxdp.checking.narrow import narrowest, permuted, perturbed
from jaxdp.checking.subject import Subject
from jaxdp.mesh import data_mesh
from jaxdp.trees import named_leaves
from jaxdp.types import Batch, Device, PyTree

NAMES = ("gradients", "weights", "optimizer")
EXACT = 1e-9  # relative; additions in another order differ by 1e-15 to 1e-12
_OPTIMIZER_STEPS = 3
_NOTICED = 1e-4  # relative: weights of 0 to 4 instead of 1 change more, where they are read
_FLOOR = 1e-6  # of the whole update's norm: leaves whose gradient is rounding alone are no evidence
_EXCUSED = 4  # times what the optimizer makes of rounding; 1 was enough in 99 of 100 trainings
_RATE_ONE = {"optimizer": optax.sgd(1.0), "clip_norm": None}

Run = Callable[..., tuple[PyTree, PyTree]]  # (devices, **options of the step) -> as `train`
Cause = Callable[["Deviation", int], str]


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
    batch = [subject.batch(0)]
    run = partial(train, subject, batch, **_RATE_ONE)
    line = _ask("gradients", "a step of SGD", subject, devices, run)
    if subject.exact_sync is None:
        return line
    rounded = partial(train, replace(subject, exact_sync=None), batch, **_RATE_ONE)
    worst = compare(rounded(devices[:1]), rounded(devices)).worst
    chosen = f"; without what the wire loses, which by choice makes it {worst:.1e}"
    return line._replace(detail=line.detail + chosen)


def weights(subject: Subject, devices: Sequence[Device], equal_is_right: bool) -> Line:
    """The same with weights from 0 to 4, and a quarter of the examples masked.

    Args:
      equal_is_right: whether equal weights gave the right gradients, so that a fault here is one
        of the weights.
    """
    name = "weights"
    run = partial(train, subject, [subject.weighted(0)], **_RATE_ONE)
    equal = train(subject, [subject.batch(0)], devices[:1], **_RATE_ONE)
    if compare(equal, run(devices[:1])).worst <= _NOTICED:
        return Line(name, "n/a", "the loss does not read batch['weight']")

    def mean_of_means(found: Deviation, n: int) -> str:
        if not equal_is_right:
            return "what 'gradients' says"
        return (
            "a mean of means: the loss must return the sum over its examples and the weight it "
            "holds, not a mean and 1"
        )

    what = "SGD, weights 0 to 4, a quarter masked"
    return _ask(name, what, subject, devices, run, mean_of_means)


def optimizer(subject: Subject, devices: Sequence[Device]) -> Line:
    """A few steps with the training's own optimizer."""
    run = partial(train, subject, [subject.weighted(t) for t in range(_OPTIMIZER_STEPS)])
    what = f"{_OPTIMIZER_STEPS} steps with its own optimizer"
    return _ask("optimizer", what, subject, devices, run, amplifies=True)


def compare(one: tuple[PyTree, PyTree], many: tuple[PyTree, PyTree]) -> Deviation:
    """The largest deviation between two (start, end), of the same start."""
    return largest(updates(*one), updates(*many))


def updates(start: PyTree, end: PyTree) -> dict[str, np.ndarray]:
    """What was added to each leaf, in float64, by path."""
    before = dict(named_leaves(start))
    return {
        name: np.asarray(x, np.float64) - np.asarray(before[name], np.float64)
        for name, x in named_leaves(end)
    }


def largest(
    right: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray], floor: float = _FLOOR
) -> Deviation:
    """The largest deviation of a leaf of `others` from that of `right`.

    Args:
      floor: the share of the norm of all leaves below which a leaf's own norm says nothing.
    """
    whole = np.sqrt(sum(float(np.vdot(x, x)) for x in right.values()))

    def of_leaf(name: str) -> Deviation:
        a, b = right[name], others[name]
        norm, scale = float(np.linalg.norm(a)), max(float(np.linalg.norm(a)), floor * whole)
        difference = float(np.linalg.norm(b - a))
        if not np.isfinite(difference):
            worst = np.inf
        else:
            worst = difference / scale if scale else difference
        ratio = float(np.vdot(a, b)) / norm**2 if norm else np.nan
        return Deviation(worst, name, norm, float(np.linalg.norm(b)), ratio, whole > 0)

    return max((of_leaf(name) for name in right), key=lambda found: found.worst)


def train(
    subject: Subject, batches: Sequence[Batch], devices: Sequence[Device], **changes: Any
) -> tuple[PyTree, PyTree]:
    """(parameters and model state at the start, at the end), in float64."""
    if subject.exact_sync is not None:
        changes["sync"] = subject.exact_sync
    with jax.enable_x64(True):
        step = subject.make_step(mesh=data_mesh(devices), compute_dtype=None, **changes)
        params, model_state = jax.tree.map(lambda x: np.asarray(x, np.float64), subject.init())
        state = step.init(params, model_state)
        for batch in batches:
            state, _ = step(state, step.place(batch))
    end = {"params": state.params, "model_state": state.model_state}
    return {"params": params, "model_state": model_state}, jax.device_get(end)


def _ask(
    name: str,
    what: str,
    subject: Subject,
    devices: Sequence[Device],
    run: Run,
    likely: Cause | None = None,
    amplifies: bool = False,
) -> Line:
    """Holds `run` on all devices against `run` on the first.

    Args:
      amplifies: whether the optimizer may make much of little, as Adam does of a gradient near 0.
    """
    what += " in float64"
    one, many, n = run(devices[:1]), run(devices), len(devices)
    found = compare(one, many)
    if not found.moved:
        detail = f"{what}: no parameter changed; the loss is not finite, or its weight is 0"
        return Line(name, "fail", detail)
    text = f"{what}: largest deviation {found.worst:.1e} ({found.leaf})"
    if found.worst <= EXACT:
        return Line(name, "pass", text)
    if (dtype := narrowest(subject, devices[0], wide=True)) != jnp.float64:
        noise = compare(one, run(devices[:1], loss_fn=permuted(subject.loss_fn))).worst
        allowed = rounding(dtype, noise)
        text += f"; its loss computes in {dtype}, where another order of examples on one "
        text += f"device makes {noise:.1e}"
        if found.worst <= allowed:
            return Line(name, "pass", text)
        if amplifies:
            # `allowed` is what a gradient may be off by; an update, what the optimizer makes of it
            shifted = (perturbed(subject.loss_fn, size) for size in (allowed, -allowed))
            found = _unexplained(one, many, [run(devices[:1], loss_fn=loss) for loss in shifted])
            if found.worst <= allowed:
                text += f"; all but {found.worst:.1e} is what the optimizer makes of a gradient "
                return Line(name, "pass", text + f"moved by {allowed:.1e}")
    return Line(
        name,
        "fail",
        f"{what}: {found.leaf} is off by {found.worst:.1e}: update of norm {found.one:.6g} on one "
        f"device, {found.many:.6g} on {n}; likely {(likely or cause)(found, n)}",
    )


def _unexplained(
    one: tuple[PyTree, PyTree], many: tuple[PyTree, PyTree], moved: Sequence[tuple[PyTree, PyTree]]
) -> Deviation:
    """`compare(one, many)` without the elements that gradients moved a little explain.

    Element by element: a mistake moves those too of which the optimizer makes nothing.

    Args:
      moved: as `one`, of gradients moved by rounding.
    """
    right, others = updates(*one), updates(*many)
    swings = [updates(*run) for run in moved]

    def kept(name: str) -> np.ndarray:
        swing = np.max([np.abs(u[name] - right[name]) for u in swings], axis=0)
        explained = np.abs(others[name] - right[name]) <= _EXCUSED * swing
        return np.where(explained, right[name], others[name])

    return largest(right, {name: kept(name) for name in right})


def rounding(dtype: Any, noise: float) -> float:
    """The deviation that rounding explains.

    Args:
      dtype: the narrowest in which something is computed.
      noise: the deviation between two orders of addition.  It underestimates: a batch of another
        shape compiles to other code, whose float32 gradients were up to 6e-7 apart where the
        order made 7e-8.  So at least 64 roundings; and never as much as a mistake makes, however
        noisy the loss.
    """
    eps = float(jnp.finfo(dtype).eps)
    return min(max(10 * noise, 64 * eps), 1000 * eps, 0.1)


def cause(found: Deviation, n: int) -> str:
    """What makes a deviation of this kind."""
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

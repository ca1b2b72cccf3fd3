"""Questions about the compiled step and what it leaves: asked of one short run on all devices."""

import logging
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxdp import hlo
from jaxdp.checking.equality import train, updates
from jaxdp.checking.lines import Line
from jaxdp.checking.precision import RATE, settled
from jaxdp.checking.subject import Subject
from jaxdp.checkpoints import Checkpoints
from jaxdp.mesh import data_mesh
from jaxdp.plan import Plan, as_planned, compare, found_totals, looped
from jaxdp.state import TrainState
from jaxdp.steps import CompiledStep, TrainStep
from jaxdp.trees import count_bytes, named_leaves
from jaxdp.types import Device

_REQUESTS = (signal.SIGTERM, signal.SIGHUP)
STEPS = 4  # the middle one is saved


class Run(NamedTuple):
    """A short run on all devices.

    Attributes:
      step: as it was used.
      compiled: what its program says.
      state: after `STEPS` steps; the one after half of them was saved.
      saved: folder of that checkpoint.
      donated: leaves of the first state that were given up, and all that could have been.
      updated: how many of the steps changed the parameters.
    """

    step: TrainStep
    compiled: CompiledStep
    state: TrainState
    saved: Path
    donated: tuple[int, int]
    updated: int


def asked_of_a_run(subject: Subject, devices: Sequence[Device]) -> Iterator[Line]:
    """All questions of this module, one after the other."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells its steps there
    with temporary_folder() as folder:
        run = run_steps(subject, devices, Path(folder) / "checkpoints")
        yield replicas(run)
        yield reductions(run, subject)
        yield resume(run, subject)
    yield one_compilation(run)
    yield donation(run)


def run_steps(subject: Subject, devices: Sequence[Device], folder: Path) -> Run:
    """Trains for `STEPS` steps with weights, saving after half of them."""
    step = subject.make_step(mesh=data_mesh(devices))
    first = state = settled(step, subject, subject.weighted(0))
    before = _left_out(state)  # fetched now: the state is donated
    with Checkpoints(folder, form=step.form) as checkpoints:
        for t in range(STEPS):
            if t == STEPS // 2:
                checkpoints.save(t, state)
            state, _ = step(state, step.place(subject.weighted(t)))
    leaves = jax.tree.leaves(first)
    donated = sum(leaf.is_deleted() for leaf in leaves), len(leaves)
    batch = step.place(subject.weighted(0))
    compiled = step.run.lower(step.init(*subject.init()), batch).compile()
    updated = STEPS - (_left_out(state) - before)
    return Run(step, compiled, state, folder, donated, updated)


def _left_out(state: TrainState) -> int:
    """Steps without an update so far."""
    overflows = state.loss_scale.overflows if state.loss_scale else 0
    return int(state.skipped) + int(state.nonfinite) + int(overflows)


def replicas(run: Run) -> Line:
    """All devices hold the same bits."""
    name = "replicas"
    if not run.updated:
        return Line(name, "fail", f"none of {STEPS} steps changed a parameter: nothing was tried")
    state = run.state  # what people know best comes first; sync_state differs between devices
    first_of_all = {"params": state.params, "model_state": state.model_state}
    rest = state._replace(params=(), model_state=(), sync_state=())._asdict()
    count = 0
    for leaf_name, leaf in named_leaves(first_of_all) + named_leaves(rest):
        if not leaf.sharding.is_fully_replicated:
            continue
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        count += 1
        for rank, other in enumerate(others, 1):
            if first.tobytes() != other.tobytes():
                return Line(name, "fail", _differs(leaf_name, rank, first, other))
    detail = f"{count} leaves equal to the bit on {run.step.mesh.size} devices"
    return Line(name, "pass", f"{detail} after {run.updated} updates")


def _differs(leaf: str, rank: int, first: np.ndarray, other: np.ndarray) -> str:
    # by bytes: 0.0 and -0.0 differ, equal NaNs do not
    raw = [np.atleast_1d(x)[..., None].view(np.uint8) for x in (first, other)]
    at = tuple(int(i[0]) for i in np.nonzero((raw[0] != raw[1]).any(-1)))
    a, b = (np.atleast_1d(x)[at] for x in (first, other))
    return (
        f"{leaf}{list(at)} is {a!s} on device 0 and {b!s} on device {rank} after {STEPS} steps; "
        "likely a reduction that is missing, or a sum that devices compute apart, unfenced"
    )


def reductions(run: Run, subject: Subject) -> Line:
    """Gradients are reduced once a step, outside of the loop over microbatches, as planned."""
    name = "reductions"
    if run.step.mesh.size == 1:
        return Line(name, "n/a", "one device reduces nothing")
    found = hlo.collectives(run.compiled.as_text() or "")
    plan = run.step.plan(run.state, run.step.place(subject.weighted(0)))
    nbytes = count_bytes(run.state.params)
    if not found:
        return Line(name, "fail", f"none, for {hlo.format_bytes(nbytes)}: nothing is reduced")
    # without a plan: what is as large as the largest leaf is no matter of a loop
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(run.state.params))
    extra = [c for c in found if c.in_loop and c.result_bytes >= largest]
    if looped(plan, found) if plan else extra:
        return Line(
            name,
            "fail",
            f"{hlo.describe(extra or found)} inside the loop over microbatches: "
            f"{run.step.parts} times the bytes; likely a reduction in the loss, or of "
            "every microbatch's gradient: reduce their sum once",
        )
    if plan is None:
        return Line(name, "pass", f"{hlo.describe(found)} found, none in a loop; no plan is stated")
    verdict = (
        "pass" if as_planned(plan, found) or _compilers_doing(plan, found, run, subject) else "fail"
    )
    return Line(name, verdict, compare(plan, found))


def _compilers_doing(plan: Plan, found: list[hlo.Collective], run: Run, subject: Subject) -> bool:
    """Whether a difference is one of form: all-reduces merged, split, or in wider types.

    Equal gradients are reduced once, so that bytes may be missing; what a wire makes 16 bits may be
    carried as float32, so that there may be twice as many.
    """
    planned, there = plan.totals(), found_totals(found)
    count, nbytes = planned.pop("all-reduce", (0, 0))
    _, found_bytes = there.pop("all-reduce", (0, 0))
    widened = 1 if subject.exact_sync is None else 2
    if not count or planned != there or found_bytes > widened * nbytes:
        return False
    return found_bytes >= nbytes or found_bytes >= nbytes - _twins_bytes(run, subject)


def _twins_bytes(run: Run, subject: Subject) -> int:
    """Bytes of the parameters whose gradient is another one's too.

    Found where training has led to: at the start gradients may be equal by chance, such as 0.
    """
    trained = jax.device_get((run.state.params, run.state.model_state))
    moved = replace(subject, init=lambda: trained)
    devices = list(run.step.mesh.devices.flat)[:1]
    start, end = train(moved, [subject.weighted(0)], devices, **RATE)
    found, nbytes = [], 0
    for name, update in updates(start["params"], end["params"]).items():
        if any(update.shape == other.shape and np.allclose(update, other) for other in found):
            nbytes += int(dict(named_leaves(run.state.params))[name].nbytes)
        found.append(update)
    return nbytes


def resume(run: Run, subject: Subject) -> Line:
    """Saved, restored and gone on with is the straight run."""
    name = "resume"
    like = run.step.init(*subject.init())
    with Checkpoints(run.saved, form=run.step.form) as checkpoints:
        state, _, _ = checkpoints.restore(like)
    first = int(state.step)
    for t in range(first, STEPS):
        state, _ = run.step(state, run.step.place(subject.weighted(t)))
    straight = dict(named_leaves(run.state))
    for leaf_name, leaf in named_leaves(state):
        a, b = np.asarray(straight[leaf_name]), np.asarray(leaf)
        if a.tobytes() != b.tobytes():
            difference = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
            return Line(
                name,
                "fail",
                f"{leaf_name} differs by up to {difference:.3g} from the straight run; likely a "
                "state that is not in the checkpoint: a counter in Python, a data pipeline that "
                "remembers, an unseeded draw",
            )
    detail = (
        f"{STEPS} steps, and {first} + {STEPS - first} with a checkpoint between: the same bits"
    )
    return Line(name, "pass", detail)


def one_compilation(run: Run) -> Line:
    """No step compiled anew."""
    name = "compilation"
    count = getattr(run.step.run, "_cache_size", lambda: 1)()
    # the resumed run used the same step: its arrays came from a checkpoint
    if count == 1:
        return Line(name, "pass", f"one program for {STEPS} steps and the resumed ones")
    return Line(
        name,
        "fail",
        f"{count} programs for {STEPS} steps; likely a shape, a dtype or a placement that changes "
        "from step to step",
    )


def donation(run: Run) -> Line:
    """The old state's memory is used for the new one."""
    name = "donation"
    given, leaves = run.donated
    state = hlo.format_bytes(count_bytes(run.state))
    if given == leaves:
        return Line(name, "pass", f"{state} of state are updated in place")
    return Line(
        name,
        "fail",
        f"{leaves - given} of {leaves} arrays of the state were kept: twice the memory; likely a "
        "step that was compiled without donate_argnums=0",
    )


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Where the checkpoint goes; removed when left, and when asked to end."""
    asked = threading.current_thread() is threading.main_thread()  # others get no signals
    usual = [s for s in _REQUESTS if asked and signal.getsignal(s) is signal.SIG_DFL]
    for number in usual:
        signal.signal(number, _end)
    try:
        with tempfile.TemporaryDirectory(prefix="jaxdp-check-") as folder:
            yield folder
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)

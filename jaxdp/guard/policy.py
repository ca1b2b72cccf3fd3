"""What a run does about replicas that differ and about numbers that are not finite."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from jaxdp import peers
from jaxdp.errors import NumericsError, UserError
from jaxdp.guard.replicas import compare_replicas, describe_differences
from jaxdp.state import TrainState

Restore = Callable[[int | None, TrainState], TrainState | None]


class FaultError(NumericsError):
    """Something went wrong after the state `before`; going back there may undo it.

    Attributes:
      step: where it was found or, of non-finite steps, the first.
      rollback: whether the policy is to go back.
      before: the newest step whose state is good; None where every checkpoint's is.
      leave_out: the steps that shall do nothing from then on.
    """

    def __init__(
        self,
        text: str,
        step: int,
        rollback: bool,
        before: int | None = None,
        leave_out: Iterable[int] = (),
    ):
        super().__init__(text)
        self.step, self.rollback = step, rollback
        self.before, self.leave_out = before, tuple(leave_out)


@dataclass
class Guard:
    """The policies of a run, and what they came to.  Steps count from 1, as in metrics.jsonl.

    A left-out step advances data and schedule, not the optimizer: like a skipped one, but nothing
    is computed, and what it would have come to is the same after a resume.

    Attributes:
      every: steps between comparisons of the replicas; 0: only at the start.
      divergence: "stop" or "rollback", where replicas differ.
      nonfinite: "stop" at the first loss, gradient or model state that is not finite; or "skip"
        such steps, or skip them and "rollback" where there are too many.
      limit: non-finite steps in a row that are skipped; one more is too many.
      restore: (newest step that will do or None for any, a state or its shapes) -> the state of the
        newest checkpoint, or None where there is none.
      tell: takes a line for the user.
      left_out: the steps that do nothing.
      rollbacks: step, to and why of each return to a checkpoint.
    """

    every: int = 100
    divergence: str = "stop"
    nonfinite: str = "stop"
    limit: int = 5
    restore: Restore = lambda before, like: None
    tell: Callable[[str], None] = lambda text: None
    left_out: set[int] = field(default_factory=set)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """What a checkpoint has to hold for a resumed run to be the straight one."""
        return {"left_out": sorted(self.left_out), "rollbacks": [dict(r) for r in self.rollbacks]}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Goes on from a `record`, or from a checkpoint that holds none."""
        self.left_out = set(record.get("left_out", ()))
        self.rollbacks = list(record.get("rollbacks", ()))

    def due(self, step: int) -> bool:
        """Whether the replicas are to be compared after `step`."""
        return self.every > 0 and step % self.every == 0

    def compare_start(self, mesh: Mesh, step: int, state: TrainState) -> None:
        """As `compare`, of the state that a run starts from.

        Raises:
          UserError: it differs between processes, each of which made its own.
          FaultError: it differs on the devices of one.
        """
        if peers.joined() == 1:
            return self.compare(mesh, step, state)
        if found := compare_replicas(mesh, state):
            raise UserError(
                f"processes start from different states: {describe_differences(found, mesh.size)}, "
                f"on {peers.joined()} processes; expected the same everywhere: the same seed, the "
                "same initial parameters"
            )
        return None

    def compare(self, mesh: Mesh, step: int, state: TrainState) -> None:
        """Raises `FaultError` if the replicas differ."""
        if found := compare_replicas(mesh, state):
            raise FaultError(
                f"replicas differ after step {step}: {describe_differences(found, mesh.size)}; "
                "a device or its memory may be failing: go on from a checkpoint with --resume, on "
                "other devices if it happens again",
                step,
                self.divergence == "rollback",
            )

    def finished(self, step: int, run: int) -> None:
        """Judges a step where the policy is not to stop at once.

        Args:
          step: the one that is finished.
          run: how many steps in a row up to it were not finite.

        Raises:
          FaultError: more than `limit`.
        """
        if not run:
            return
        if run <= self.limit:
            self.tell(
                f"step {step}: the loss, a gradient or the model state was not finite; the step "
                f"changed nothing ({run} in a row, at most {self.limit} are skipped)"
            )
            return
        first = step - run + 1
        raise FaultError(
            f"a loss, gradient or model state was not finite in the {run} steps from {first} to "
            f"{step}, more than guard.limit = {self.limit}; they changed nothing: look for bad "
            "input, or start a new run with a lower learning rate or with optimizer.clip_norm",
            first,
            self.nonfinite == "rollback",
            before=first - 1,
            leave_out=range(first, first + self.limit + 1),
        )

    def go_back(self, fault: FaultError, like: TrainState) -> TrainState:
        """The state to go on from.

        Args:
          fault: what was found.
          like: the shapes, dtypes and shardings of the state.

        Raises:
          NumericsError: the policy is to stop, going back did not help, or there is no checkpoint.
        """
        if not fault.rollback:
            raise fault
        if self._happened_before(fault):
            raise NumericsError(f"{fault} (going back to a checkpoint did not help)") from fault
        state = self.restore(fault.before, like)
        if state is None:
            raise NumericsError(f"{fault} (no checkpoint from before to go back to)") from fault
        to, why = int(state.step), "nonfinite" if fault.leave_out else "divergence"
        self.rollbacks.append({"step": fault.step, "to": to, "why": why})
        self.left_out |= set(fault.leave_out)
        what = str(fault).partition(";")[0]
        self.tell(f"{what}; going on from the checkpoint of step {to}{self._without(fault)}")
        return state

    def _happened_before(self, fault: FaultError) -> bool:
        if fault.leave_out:  # the first update after those left out fails as they did
            return fault.step - 1 in self.left_out
        return any(r["step"] == fault.step and r["why"] == "divergence" for r in self.rollbacks)

    def _without(self, fault: FaultError) -> str:
        if not fault.leave_out:
            return ""
        return f", without the batches of steps {fault.leave_out[0]} to {fault.leave_out[-1]}"

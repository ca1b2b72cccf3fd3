"""Evaluation that gives the same numbers on any number of devices.

The devices return sums per example; the host adds them in float64, in example order.  Padding has
weight 0, so that every example counts once and none is dropped.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdp import peers
from jaxdp.errors import UserError
from jaxdp.loss_path import checked_loss
from jaxdp.mesh import AXIS, everywhere, on_mesh, own_positions, place_own, rows_of
from jaxdp.types import Batch, LossFn, PyTree

_IN_FLIGHT = 2  # batches on the devices while the host adds up the one before


@dataclass(frozen=True)
class EvalStep:
    """Per-example sums of a batch: `step(params, model_state, batch)`."""

    run: Callable[[PyTree, PyTree, Batch], Any]  # a jitted function
    mesh: Mesh

    def __call__(self, params: PyTree, model_state: PyTree, batch: Batch) -> Any:
        """Returns name -> (sum, weight), each `[B]`; `batch` comes from the host, `[B, ...]`.

        Raises:
          UserError: the number of devices does not divide B.
        """
        size = len(next(iter(batch.values())))
        if size % self.mesh.size:
            raise UserError(
                f"evaluation batch: {size} examples on {self.mesh.size} devices; expected a "
                f"multiple of {self.mesh.size}"
            )
        rows = self.rows(size)
        return self.of_rows(params, model_state, {name: x[rows] for name, x in batch.items()})

    def rows(self, size: int) -> slice | np.ndarray:
        """Which examples of a batch of `size` this process's devices work on, int64."""
        own = own_positions(self.mesh)
        return slice(None) if len(own) == self.mesh.size else rows_of(own, self.mesh.size, size)

    def of_rows(self, params: PyTree, model_state: PyTree, batch: Batch) -> Any:
        """As when called, of a batch of which this process has its `rows` alone."""
        found = self.run(params, model_state, place_own(self.mesh, batch, dim=0))
        # a program of its own: what an example comes to does not depend on who else wants it
        return found if peers.joined() == 1 else everywhere(self.mesh, found)


def make_eval_step(loss_fn: LossFn, mesh: Mesh, *, compute_dtype: Any = None) -> EvalStep:
    """Builds the evaluation of `loss_fn` (called with keys None) for all devices of `mesh`."""
    loss = checked_loss(loss_fn, compute_dtype)

    def body(params: PyTree, model_state: PyTree, batch: Batch):
        def one(example: Batch):
            out = loss(params, model_state, jax.tree.map(lambda x: x[None], example), None)
            return {"loss": (out.sum, out.weight), **out.metrics}

        return jax.vmap(one)(batch)

    return EvalStep(jax.jit(on_mesh(body, mesh, (P(), P(), P(AXIS)), P(AXIS))), mesh)


def evaluate(
    step: EvalStep,
    params: PyTree,
    model_state: PyTree,
    batches: Iterable[Batch],
    *,
    own_rows: bool = False,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Means over all examples of `batches`.

    Args:
      step: from `make_eval_step`.
      params, model_state: as in the train state.
      batches: host batches of one shape, the last one padded with `weight` 0.
      own_rows: whether each holds `step.rows` alone, not the examples of all processes.
      on_batch: called after each batch, when the devices have finished it.

    Returns:
      name -> mean, and "weight": how many examples (or tokens) it is over.
    """
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    pending: deque[Any] = deque()

    def add_oldest() -> None:
        for name, sum_and_weight in jax.device_get(pending.popleft()).items():
            # a plain loop over examples in effect: cumsum adds in order, np.sum would not
            totals[name] += [np.cumsum(x, dtype=np.float64)[-1] for x in sum_and_weight]
        on_batch()

    run = step.of_rows if own_rows else step
    for batch in batches:
        pending.append(run(params, model_state, batch))
        if len(pending) > _IN_FLIGHT:
            add_oldest()
    while pending:
        add_oldest()
    means = {name: float(s / w) if w else float("nan") for name, (s, w) in totals.items()}
    return means | {"weight": float(totals["loss"][1])}

"""How a process feeds its devices: each reads no more of a batch than it has to."""

from collections.abc import Callable
from typing import Any, Protocol

from jaxdp import peers
from jaxdp.data import Loader
from jaxdp.errors import UserError
from jaxdp.steps import TrainStep
from jaxdp.trees import digest
from jaxdp.types import Batch


class Batches(Protocol):
    """The data stream: a function of the step, the same in every process.

    Of a `jaxdp.data.Loader` each process reads its own rows alone.
    """

    def batch(self, step: int) -> Batch:
        """The global batch of a step, NumPy arrays `[B, ...]`."""
        ...


def placing(step: TrainStep, batches: Batches, first: int) -> Callable[[int], Any]:
    """step -> its batch on the devices, of which this process reads no more than it has to.

    Raises:
      UserError: the processes' streams differ in the first batch.
    """
    if isinstance(batches, Loader):
        rows = step.rows(batches.global_batch)
        return lambda t: step.place_rows(batches.batch(t, rows))
    if peers.joined() > 1:
        found = peers.from_all(digest(dict(batches.batch(first))))
        if other := [r for r, text in enumerate(found) if text != found[0]]:
            raise UserError(
                f"batches: the batch of step {first} in process {other[0]} is not that of process "
                "0; expected the global batch in every process, which takes its rows of it: with a "
                "jaxdp.data.Loader each reads these alone"
            )
    return lambda t: step.place(batches.batch(t))

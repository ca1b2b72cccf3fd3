"""The form of a training step, whatever it does with the gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UserError
from jaxdp.loss_path import refuse_integers
from jaxdp.mesh import AXIS
from jaxdp.plan import Plan
from jaxdp.state import AS_IT_IS, SavedForm, TrainState
from jaxdp.types import Batch, PyTree

Metrics = Mapping[str, jax.Array]


@dataclass(frozen=True)
class TrainStep:
    """A compiled step: `state, metrics = step(state, step.place(batch))`.

    `state` is donated: the arrays that were passed in are gone afterwards.

    Attributes:
      run: (state, placed batch) -> (state, metrics), a jitted function.
      mesh: the devices.
      parts: in how many parts, one after the other, a device works off its share of a batch.
      first_state: (params, model_state) -> the state before step 0, placed.
      planned: (state, placed batch), or their shapes -> the collectives of `run`; None where nobody
        stated them.
      form: how the state is kept in checkpoints.
    """

    run: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    mesh: Mesh
    parts: int
    first_state: Callable[[PyTree, PyTree], TrainState]
    planned: Callable[[TrainState, Batch], Plan | None]
    form: SavedForm = AS_IT_IS

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step.

        Args:
          state: from `init`, or from the step before.
          batch: from `place`: leaves `[parts, devices * b, ...]`.

        Returns:
          The new state, and float32 scalars: loss, weight, grad_norm (of the reduced gradient,
          before clipping), skipped and nonfinite (steps without an update so far), nonfinite_run
          (of the latter, in a row up to this one), and the loss's own metrics.  In float16, too:
          loss_scale (the next step's) and overflows (steps without an update, so far).
        """
        return self.run(state, batch)

    def init(self, params: PyTree, model_state: PyTree = None) -> TrainState:
        """The state before step 0, on every device.

        Args:
          params: floating arrays; copied, so that donating the state leaves the caller's alone.
          model_state: floating arrays, averaged over devices by weight after every step; None
            where the model has none.

        Raises:
          UserError: a leaf is not floating.
        """
        refuse_integers("params", params)
        refuse_integers("model_state", model_state)
        model_state = {} if model_state is None else model_state
        return self.first_state(jax.tree.map(jnp.array, params), model_state)

    def plan(self, state: TrainState, batch: Batch) -> Plan | None:
        """The collectives of the compiled step; None if the synchronisation does not state them.

        Args:
          state, batch: as `run` gets them, or only their shapes and dtypes.
        """
        return self.planned(*jax.tree.map(_shape, (state, batch)))

    def place(self, batch: Batch) -> Batch:
        """Puts a global batch from the host on the devices.

        Part m holds examples m * B / M to (m + 1) * B / M whatever the number of devices.

        Args:
          batch: NumPy arrays `[B, ...]`.

        Raises:
          UserError: parts x devices does not divide B, or arrays differ in length.
        """
        lengths = {name: len(x) if np.ndim(x) else 0 for name, x in batch.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(f"batch: arrays of lengths {lengths}; expected one length for all")
        return jax.device_put(
            {name: self._cut(name, x) for name, x in batch.items()},
            NamedSharding(self.mesh, P(None, AXIS)),
        )

    def _cut(self, name: str, x: np.ndarray) -> np.ndarray:
        parts = self.parts * self.mesh.size
        if x.ndim == 0 or x.shape[0] % parts or not x.shape[0]:
            raise UserError(
                f"batch[{name!r}]: shape {x.shape}; expected a first dimension divisible by "
                f"{parts} ({self.parts} microbatches x {self.mesh.size} devices)"
            )
        return x.reshape(self.parts, -1, *x.shape[1:])


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

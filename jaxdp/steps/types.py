"""The form of a training step, whatever it does with the gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdp.errors import UserError
from jaxdp.loss_path import refuse_integers
from jaxdp.mesh import own_positions, place_own, rows_of
from jaxdp.plan import Plan
from jaxdp.state import AS_IT_IS, SavedForm, TrainState
from jaxdp.steps.shards import by_turns
from jaxdp.trees import shapes
from jaxdp.types import Batch, PyTree

Metrics = Mapping[str, jax.Array]


class CompiledStep(Protocol):
    """A `jax.stages.Compiled`, or what stands for several of them.

    Attributes:
      args_info: ((state, batch), {}), of shapes and dtypes.
    """

    @property
    def args_info(self) -> Any: ...

    def as_text(self) -> str | None:
        """What the compiler made of it, for `jaxdp.hlo`."""
        ...

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]: ...


@dataclass(frozen=True)
class TrainStep:
    """A compiled step: `state, metrics = step(state, step.place(batch))`.

    `state` is donated: the arrays that were passed in are gone afterwards.

    Attributes:
      run: (state, placed batch) -> (state, metrics), a jitted function or a `Pipeline` of some.
      mesh: the devices.
      parts: in how many parts, one after the other, a device works off its share of a batch.
      first_state: (params, model_state) -> the state before step 0, placed.
      planned: (state, placed batch), or their shapes -> the collectives of `run`; None where nobody
        stated them.
      form: how the state is kept in checkpoints.
      logical_shards: into how many every part is cut, whatever the number of devices; None: into
        as many as there are devices.
      peeled: whether the last of these parts is computed behind the loop over the others.
    """

    run: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    mesh: Mesh
    parts: int
    first_state: Callable[[PyTree, PyTree], TrainState]
    planned: Callable[[TrainState, Any], Plan | None]
    form: SavedForm = AS_IT_IS
    logical_shards: int | None = None
    peeled: bool = False

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One optimizer step.

        Args:
          state: from `init`, or from the step before.
          batch: from `place`.

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

    def plan(self, state: TrainState, batch: Any) -> Plan | None:
        """The collectives of the compiled step; None if the synchronisation does not state them.

        Args:
          state, batch: as `run` gets them, or only their shapes and dtypes.
        """
        return self.planned(*shapes((state, batch)))

    def place(self, batch: Batch) -> Any:
        """Puts a global batch from the host on the devices.

        Part m holds examples m * B / M to (m + 1) * B / M whatever the number of devices.  In a job
        of several processes each gives the whole batch, and takes what its devices work on.

        Args:
          batch: NumPy arrays `[B, ...]`.

        Returns:
          Leaves `[parts, devices * b, ...]`; with logical shards, `shards.by_turns` of them.

        Raises:
          UserError: the batch is no dict of arrays, parts x devices (or logical shards) does not
            divide B, or arrays differ in length.
        """
        _check_batch(batch)
        for name, x in batch.items():
            self._check_length(f"batch[{name!r}]: shape {x.shape}", len(x) if np.ndim(x) else 0)
        rows = self.rows(len(next(iter(batch.values()))))
        return self.place_rows({name: x[rows] for name, x in batch.items()})

    def rows(self, global_batch: int) -> slice | np.ndarray:
        """Which examples of a global batch this process's devices work on.

        Returns:
          All of them in a job of one process; else their row numbers, int64, part by part.

        Raises:
          UserError: parts x devices (or logical shards) does not divide the batch.
        """
        self._check_length(f"global batch of {global_batch}", global_batch)
        own = own_positions(self.mesh)
        if len(own) == self.mesh.size:
            return slice(None)
        return rows_of(own, self.mesh.size, global_batch, self.parts)

    def place_rows(self, batch: Batch) -> Any:
        """Puts a part of a global batch, `rows` of it, on this process's devices.

        Args:
          batch: NumPy arrays, of one length.

        Returns:
          As `place`.

        Raises:
          UserError: the batch is no dict of arrays of one length.
        """
        _check_batch(batch)
        cut = {name: x.reshape(self.parts, -1, *x.shape[1:]) for name, x in batch.items()}
        if self.logical_shards is None:
            return place_own(self.mesh, cut, dim=1)
        own = own_positions(self.mesh)
        return place_own(self.mesh, by_turns(cut, self.logical_shards, self.mesh.size, own), dim=0)

    def _check_length(self, given: str, length: int) -> None:
        shards = self.logical_shards or self.mesh.size
        what = "devices" if self.logical_shards is None else "logical shards"
        parts = self.parts * shards
        if length % parts or not length:
            raise UserError(
                f"{given}; expected a first dimension divisible by {parts} ({self.parts} parts x "
                f"{shards} {what})"
            )


def _check_batch(batch: Any) -> None:
    expected = "expected a dict of NumPy arrays, name -> [B, ...]"
    if not isinstance(batch, Mapping) or not batch:
        given = "empty" if isinstance(batch, Mapping) else f"of type {type(batch).__name__}"
        raise UserError(f"batch is {given}; {expected}")
    for name, x in batch.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise UserError(f"batch[{name!r}] is of type {type(x).__name__}; {expected}")
        if getattr(x.dtype, "kind", "") in "OSUmM":
            raise UserError(f"batch[{name!r}] is of dtype {x.dtype}; expected numbers")
    lengths = {name: len(x) if np.ndim(x) else 0 for name, x in batch.items()}
    if len(set(lengths.values())) != 1:
        raise UserError(f"batch: arrays of lengths {lengths}; expected one length for all")

"""A step of three programs: sums of one shard, their reduction, the update.

    sums     compiled for one device: run once per logical shard, on the device that has it.
    reduce   compiled for all devices together: adds the shards' sums.
    update   compiled for one device: run by every device, on the same sums.

A program for n devices is compiled otherwise than one for 1: XLA partitions it before it optimises,
and fuses, contracts and vectorises what is left.  The same program for one device has the same
instructions wherever it runs.  The reduction only adds what other programs have rounded, which is
the same however it is compiled.

Nothing waits: all programs of a step are dispatched, and run when their inputs are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxdp.mesh import AXIS
from jaxdp.state import TrainState
from jaxdp.steps.shards import Shards
from jaxdp.steps.types import Metrics
from jaxdp.trees import shapes
from jaxdp.types import PyTree

Turns = Sequence[Shards]


@dataclass(frozen=True)
class Pipeline:
    """Three jitted functions with the interface of one: called, or lowered and compiled.

    Attributes:
      mesh: the devices.
      reads: state -> what `sums` needs of it.
      sums: (`reads(state)`, one device's `Shards`) -> leaves `[1, ...]`; of one device.
      reduce: list over turns of leaves `[n, ...]`, sharded -> global sums, replicated.
      update: (state, global sums) -> (state, metrics), donating the state; of one device.
    """

    mesh: Mesh
    reads: Callable[[TrainState], PyTree]
    sums: Any
    reduce: Any
    update: Any

    def __call__(self, state: TrainState, batch: Turns) -> tuple[TrainState, Metrics]:
        n = len(self.mesh.local_devices)
        programs = _Programs((self.sums,) * n, self.reduce, (self.update,) * n)
        return self.run(programs, state, batch)

    def lower(self, state: TrainState, batch: Turns) -> "Lowered":
        """Traces all programs for arguments like these.

        Those of one device are compiled anew for every device: XLA binds a program to its own.
        """
        alone = [SingleDeviceSharding(device) for device in self.mesh.local_devices]
        first = (self.reads(state), jax.tree.map(partial(_rows, 1), batch[0]))
        sums = [self.sums.lower(*_placed(first, device)) for device in alone]
        turn = jax.tree.map(partial(_rows, self.mesh.size), sums[0].out_info)
        reduce = self.reduce.lower([_placed(turn, NamedSharding(self.mesh, P(AXIS)))] * len(batch))
        last = (state, reduce.out_info)
        update = [self.update.lower(*_placed(last, device)) for device in alone]
        return Lowered(self, sums, reduce, update, shapes((state, batch)))

    def run(
        self, programs: "_Programs", state: TrainState, batch: Turns
    ) -> tuple[TrainState, Metrics]:
        """One step by these programs."""
        states = per_device(state)
        turns = []
        for shards in batch:
            here = zip(programs.sums, states, per_device(shards), strict=True)
            found = [sums(self.reads(own), shard) for sums, own, shard in here]
            turns.append(self._joined(found, P(AXIS)))
        totals = per_device(programs.reduce(turns))
        here = zip(programs.update, states, totals, strict=True)
        return self._joined([update(own, total) for update, own, total in here], P())

    def _joined(self, trees: list[PyTree], spec: P) -> PyTree:
        """Each device's trees as one: the devices' rows one below the other, or equal copies."""
        sharding = NamedSharding(self.mesh, spec)

        def joined(*parts: jax.Array) -> jax.Array:
            shape = parts[0].shape
            if spec:
                shape = (self.mesh.size, *shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

        return jax.tree.map(joined, *trees)

    def _cache_size(self) -> int:
        """How often a step was compiled: the most of any program, on each device."""
        devices = len(self.mesh.local_devices)
        alone = max(self.sums._cache_size(), self.update._cache_size())
        return max(-(-alone // devices), self.reduce._cache_size())


class _Programs(NamedTuple):
    """What runs: `sums` and `update` once for each of this process's devices."""

    sums: tuple[Any, ...]
    reduce: Any
    update: tuple[Any, ...]


class Lowered(NamedTuple):
    """As `jax.stages.Lowered`, as far as a loop needs it."""

    pipeline: Pipeline
    sums: list[Any]
    reduce: Any
    update: list[Any]
    args: tuple[PyTree, PyTree]

    def as_text(self) -> str:
        """The programs, one after the other; what is the same on all devices, once."""
        programs = (self.sums[0], self.reduce, self.update[0])
        return "\n".join(program.as_text() for program in programs)

    def compile(self) -> "Compiled":
        """Compiles all programs."""
        sums = tuple(program.compile() for program in self.sums)
        update = tuple(program.compile() for program in self.update)
        programs = _Programs(sums, self.reduce.compile(), update)
        return Compiled(self.pipeline, programs, (self.args, {}))


class Compiled(NamedTuple):
    """As `jax.stages.Compiled`, as far as a loop needs it.

    Attributes:
      args_info: ((state, batch), {}), of shapes and dtypes.
    """

    pipeline: Pipeline
    programs: _Programs
    args_info: Any

    def __call__(self, state: TrainState, batch: Turns) -> tuple[TrainState, Metrics]:
        """One step."""
        return self.pipeline.run(self.programs, state, batch)

    def as_text(self) -> str:
        """The programs, one after the other; what is the same on all devices, once."""
        (sums, *_), reduce, (update, *_) = self.programs
        return "\n".join(program.as_text() for program in (sums, reduce, update))


def per_device(tree: PyTree) -> list[PyTree]:
    """A tree as each of this process's devices holds it; nothing is copied."""
    leaves, structure = jax.tree.flatten(tree)
    columns = zip(*([s.data for s in leaf.addressable_shards] for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, column) for column in columns]


def _placed(tree: PyTree, sharding: Sharding) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _rows(n: int, x: Any) -> jax.ShapeDtypeStruct:
    """The shape of `x` with n rows."""
    return jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)

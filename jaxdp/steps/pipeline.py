"""A step of three programs: sums of one shard, their reduction, the update.

    sums     compiled for one device, though for every device: the same instructions whatever the
             number of devices.  Run once per logical shard.
    reduce   compiled for all devices: adds the shards' sums.
    update   compiled for all devices: new parameters from the global sums.

A single program would be compiled anew, and otherwise, for every number of devices.  What passes
between programs has been rounded: no multiply of one is contracted into an add of the next.
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
from jaxdp.types import PyTree

Turns = Sequence[Shards]


@dataclass(frozen=True)
class Pipeline:
    """Three jitted functions with the interface of one: called, or lowered and compiled.

    Attributes:
      mesh: the devices.
      reads: state -> what `sums` needs of it.
      sums: (`reads(state)`, one device's `Shards`) -> leaves `[1, ...]`, on that device.
      reduce: list over turns of leaves `[n, ...]`, sharded -> global sums, replicated.
      update: (state, global sums) -> (state, metrics); donates the state.
    """

    mesh: Mesh
    reads: Callable[[TrainState], PyTree]
    sums: Any
    reduce: Any
    update: Any

    def __call__(self, state: TrainState, batch: Turns) -> tuple[TrainState, Metrics]:
        n = len(self.mesh.local_devices)
        return self.run(_Programs((self.sums,) * n, self.reduce, self.update), state, batch)

    def lower(self, state: TrainState, batch: Turns) -> "Lowered":
        """Traces all programs for arguments like these.

        `sums` is compiled anew for every device: the same program, but XLA binds it to one.
        """
        reads, shards = self.reads(state), jax.tree.map(partial(_rows, 1), batch[0])
        each = [
            self.sums.lower(*_placed((reads, shards), SingleDeviceSharding(device)))
            for device in self.mesh.local_devices
        ]
        row = jax.tree.map(partial(_rows, self.mesh.size), each[0].out_info)
        turn = _placed(row, NamedSharding(self.mesh, P(AXIS)))
        reduce = self.reduce.lower([turn] * len(batch))
        total = _placed(reduce.out_info, NamedSharding(self.mesh, P()))
        update = self.update.lower(state, total)
        return Lowered(self, each, reduce, update, jax.tree.map(_shape, (state, batch)))

    def run(
        self, programs: "_Programs", state: TrainState, batch: Turns
    ) -> tuple[TrainState, Metrics]:
        """One step by these programs."""
        inputs = per_device(self.reads(state))
        turns = []
        for shards in batch:
            here = zip(programs.sums, inputs, per_device(shards), strict=True)
            turns.append(self._spread([sums(reads, shard) for sums, reads, shard in here]))
        return programs.update(state, programs.reduce(turns))

    def _spread(self, trees: list[PyTree]) -> PyTree:
        """Each device's leaves `[1, ...]` as leaves `[n, ...]`, sharded."""
        sharding = NamedSharding(self.mesh, P(AXIS))

        def joined(*parts: jax.Array) -> jax.Array:
            shape = (self.mesh.size, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

        return jax.tree.map(joined, *trees)

    def _cache_size(self) -> int:
        """How often a step was compiled: the most of any program, `sums` counted per device."""
        devices = len(self.mesh.local_devices)
        sums = -(-self.sums._cache_size() // devices)
        return max(sums, self.reduce._cache_size(), self.update._cache_size())


class _Programs(NamedTuple):
    """What runs: `sums` once for each of this process's devices."""

    sums: tuple[Any, ...]
    reduce: Any
    update: Any


class Lowered(NamedTuple):
    """As `jax.stages.Lowered`, as far as a loop needs it."""

    pipeline: Pipeline
    sums: list[Any]
    reduce: Any
    update: Any
    args: tuple[PyTree, PyTree]

    def compile(self) -> "Compiled":
        """Compiles all programs."""
        sums = tuple(program.compile() for program in self.sums)
        programs = _Programs(sums, self.reduce.compile(), self.update.compile())
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
        """The programs, one after the other; `sums`, the same on all devices, once."""
        (sums, *_), reduce, update = self.programs
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


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

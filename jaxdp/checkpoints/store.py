"""Saving and restoring the train state with Orbax."""

import errno
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from jaxdp import peers
from jaxdp.errors import StorageError
from jaxdp.mesh import place
from jaxdp.state import AS_IT_IS, SavedForm, TrainState
from jaxdp.trees import named_leaves
from jaxdp.types import PyTree

STATE, META = "state", "meta"
Leaves = dict[str, tuple[tuple[int, ...], Any]]  # path -> shape, dtype


class Checkpoints:
    """The checkpoints of one run: a folder per step, written in the background.

    Use as a context manager: leaving it waits until the last save is complete.
    """

    def __init__(self, folder: Path, keep: int = 3, form: SavedForm = AS_IT_IS):
        """Opens or creates `folder`; the newest `keep` steps are kept, in the step's `form`.

        Raises:
          StorageError: the folder cannot be created.
        """
        self.folder, self._form = folder.absolute(), form
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        handlers = {STATE: ocp.StandardCheckpointHandler(), META: ocp.JsonCheckpointHandler()}
        try:
            self._manager = ocp.CheckpointManager(
                self.folder, options=options, item_handlers=handlers
            )
        except OSError as error:
            raise StorageError(f"{folder}: cannot hold checkpoints: {error}") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._manager.close()
        except Exception as error:
            if kind is None:  # else the exception that is on its way says more
                raise _not_saved(self.folder, error) from error

    def steps(self) -> list[int]:
        """The steps that are there, oldest first: for several processes, as process 0 sees them."""
        return peers.from_first(lambda: sorted(self._manager.all_steps()))

    def save(self, step: int, state: TrainState, meta: dict[str, Any] | None = None) -> None:
        """Starts saving; returns as soon as `state` may be donated.

        Raises:
          StorageError: this save, or an earlier one in the background, failed.
        """
        if step in self._manager.all_steps():
            return  # resumed there and stopped before the next step
        # a copy, since Orbax may read CPU buffers in place while the next step reuses them
        copy = _copied(self._form.saved(state)._asdict())
        args = {STATE: ocp.args.StandardSave(copy), META: ocp.args.JsonSave(meta or {})}
        try:
            started = self._manager.save(step, args=ocp.args.Composite(**args))
        except (OSError, ValueError) as error:
            raise _not_saved(self.folder, error) from error
        if not started:
            raise StorageError(f"{self.folder / str(step)}: not saved: a later step is there")

    def wait(self) -> None:
        """Returns when every save is complete on disk.

        Raises:
          StorageError: one failed.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise _not_saved(self.folder, error) from error

    def restore(
        self, like: TrainState, at_most: int | None = None
    ) -> tuple[TrainState, dict[str, Any], list[str]]:
        """The newest state that can be read.

        A step that cannot be read is moved to `damaged/` beside the checkpoints, never deleted,
        and the one before it is used.

        Args:
          like: a state of the shapes, dtypes and shardings wanted.
          at_most: the newest step that will do; later ones are moved to `abandoned/`, so that the
            run can save those steps again.

        Returns:
          (state, its meta, a line for each step that was moved aside).

        Raises:
          StorageError: there is none, or a leaf has another shape or dtype.
        """
        damaged: dict[int, str] = {}
        steps = self.steps()
        abandoned = [step for step in steps if at_most is not None and step > at_most]
        for step in reversed([step for step in steps if step not in abandoned]):
            state, meta, reason = None, {}, ""
            try:
                state, meta = self._restore_step(step, like)
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            # what one process cannot read, none goes on from
            if reason := next(filter(None, peers.from_all(reason)), ""):
                damaged[step] = f"checkpoint {step} cannot be read ({reason})"
            elif state is not None:
                # only now: where none can be read, the fault may be the machine's
                lines = [f"{damaged[s]}; {self._move_aside(s)}" for s in damaged]
                lines += [f"checkpoint {s} {self._move_aside(s, 'abandoned')}" for s in abandoned]
                return state, meta, lines
        raise StorageError(*damaged.values(), f"{self.folder}: no checkpoint that can be read")

    def _restore_step(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        saved, kept = _saved_leaves(self._manager, step), self._form.like(like)
        before = _other_slots(saved, like) if self._form.respread else None
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), kept._asdict()
        )
        if before is not None:  # NumPy: as it was saved, whatever the devices are now
            target["sync_state"] = jax.tree.map(
                lambda x: np.empty((before, *x.shape[1:]), x.dtype), like.sync_state
            )
        _check_leaves(step, saved, target)
        args = {STATE: ocp.args.StandardRestore(target), META: ocp.args.JsonRestore()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        found = TrainState(**restored[STATE])
        if before is not None and (rule := self._form.respread):
            devices = len(jax.tree.leaves(like.sync_state)[0])
            slots = rule(found.sync_state, devices)
            found = found._replace(sync_state=jax.tree.map(_placed_as, slots, like.sync_state))
        return self._form.restored(found, like), restored[META]

    def _move_aside(self, step: int, where: str = "damaged") -> str:
        def move() -> str:
            target = self.folder.parent / where / str(step)
            while target.exists():
                target = target.with_name(target.name + "-again")
            target.parent.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(target)
            return f"moved to {target.parent.name}/{target.name}"

        moved = peers.from_first(move)
        self._manager.reload()
        return moved


def _saved_leaves(manager: ocp.CheckpointManager, step: int) -> Leaves:
    """Name -> shape and dtype of what a checkpoint holds."""
    metadata = manager.item_metadata(step)[STATE]
    if metadata is None:
        raise ValueError("its metadata is missing")
    return {
        name: (tuple(leaf.shape), jnp.dtype(leaf.dtype))
        for name, leaf in named_leaves(metadata.tree)
    }


def _other_slots(saved: Leaves, like: TrainState) -> int | None:
    """The devices whose sync_state was saved, where their number is not that of `like`."""
    for name, leaf in named_leaves({"sync_state": like.sync_state}):
        shape, _ = saved.get(name, ((), None))
        if shape and shape[0] != leaf.shape[0]:
            return shape[0]
    return None


def _placed_as(x: Any, like: jax.Array) -> jax.Array:
    assert isinstance(like.sharding, NamedSharding)
    return place(x, like.sharding)


def _check_leaves(step: int, saved: Leaves, target: dict[str, Any]) -> None:
    """Orbax casts and reshapes without a word: compare what is saved with what is wanted first."""
    wanted = {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(target)}
    if saved != wanted:
        different = [n for n in [*wanted, *saved] if saved.get(n) != wanted.get(n)]
        name = min(different, key=lambda n: not n.startswith("params/"))  # what people know best
        raise StorageError(
            f"checkpoint {step}: {name} is {_describe(saved.get(name))} there and "
            f"{_describe(wanted.get(name))} in this run; resume with the configuration that "
            "saved it"
        )


def _not_saved(folder: Path, error: BaseException) -> StorageError:
    """Of this save, or of one before it in the background: the error does not always say which."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    full = os.strerror(errno.ENOSPC)
    # the layers below repeat the names of their files until nobody finds the reason
    return StorageError(f"{folder}: saving failed: {full if full in reason else reason[:200]}")


def _describe(leaf: tuple[tuple[int, ...], Any] | None) -> str:
    return "absent" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


_copy = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays])


def _copied(tree: PyTree) -> PyTree:
    """The tree with its device arrays copied, in one program; what is on the host is left there."""
    leaves, structure = jax.tree.flatten(tree)
    copies = iter(_copy([leaf for leaf in leaves if isinstance(leaf, jax.Array)]))
    kept = [next(copies) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, kept)

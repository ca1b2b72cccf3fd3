"""Orbax: trees of arrays to files and back, in the background.

A step is written under another name, gets its manifest, and then its own name: under the name of a
step there is nothing, or all of it.
"""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # Orbax's paths

from jaxdp.checkpoints.files import DamageError
from jaxdp.checkpoints.folders import partial_folder, remove_given_up, remove_leftovers
from jaxdp.errors import StorageError
from jaxdp.trees import named_leaves
from jaxdp.types import PyTree

STATE = "state"  # the item's folder, as Orbax's own CheckpointManager lays it out


class Writer:
    """Saves one tree at a time; what fails in the background is raised by the next call."""

    def __init__(self, folder: Path):
        handler = ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler())
        self._folder = folder
        self._orbax = ocp.AsyncCheckpointer(handler)
        self._thread: threading.Thread | None = None
        self.failure: StorageError | None = None  # of a save, of which nobody was told yet

    def start(self, step: int, tree: PyTree, complete: Callable[[Path], None]) -> None:
        """Starts writing; returns when Orbax has read what it needs from devices.

        Args:
          step: its number.
          tree: arrays that nobody changes or donates.
          complete: called in the background with the folder of what was written, which no step
            has the name of yet; it has to make it one.

        Raises:
          StorageError: this save, or one before it in the background, failed.
        """
        self.wait()
        args = ocp.args.Composite(state=ocp.args.StandardSave(tree))
        try:
            if jax.process_index() == 0:
                remove_leftovers(self._folder, step)  # of an attempt that was interrupted
            self._orbax.save(partial_folder(self._folder, step), args=args)
        except Exception as error:
            raise self._given_up(step, error) from error
        self._thread = threading.Thread(
            target=self._finish,
            args=(step, complete, bool(jax.config.read("jax_enable_x64"))),
            name=f"checkpoint {step}",
        )
        self._thread.start()

    def _finish(self, step: int, complete: Callable[[Path], None], x64: bool) -> None:
        try:
            self._orbax.wait_until_finished()
            with jax.enable_x64(x64):  # may have been set for the caller's thread alone
                complete(partial_folder(self._folder, step))
        except BaseException as error:
            self.failure = self._given_up(step, error)

    def _given_up(self, step: int, error: BaseException) -> StorageError:
        if jax.process_index() == 0:
            with suppress(OSError):  # what made the save fail may stand in the way here too
                remove_given_up(self._folder, step)
        return error if isinstance(error, StorageError) else not_saved(self._folder, error)

    def _check(self) -> None:
        if (failure := self.failure) is not None:
            self.failure = None
            raise failure

    def wait(self) -> None:
        """Returns when the save on its way is complete, or raises StorageError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._check()

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        try:
            self.wait()
        finally:
            self._orbax.close()


def restore(folder: Path, target: PyTree) -> PyTree:
    """Reads a step.

    Args:
      folder: of the step.
      target: where each leaf goes: a `ShapeDtypeStruct` with a sharding, or a NumPy array, which is
        not written to.

    Raises:
      DamageError: it cannot be read.
    """
    try:
        handler, args = ocp.StandardCheckpointHandler(), ocp.args.StandardRestore(target)
        # not through a Checkpointer, which may want marker files that a copy does not have
        return handler.restore(epath.Path(folder / STATE), args=args)
    except Exception as error:  # of any type: tensorstore, zstd, json and jax raise their own
        raise DamageError(f"it cannot be read: {reason(error)}") from error


def read_leaves(folder: Path) -> dict[str, np.ndarray]:
    """Path -> every leaf of a step, in host memory.

    Raises:
      DamageError: it cannot be read.
    """
    try:
        item = epath.Path(folder / STATE)
        tree: Any = ocp.StandardCheckpointHandler().metadata(item).tree
    except Exception as error:
        raise DamageError(f"it cannot be read: {reason(error)}") from error
    wanted = jax.tree.map(lambda x: np.empty(x.shape, jnp.dtype(x.dtype)), tree)
    return dict(named_leaves(restore(folder, wanted)))


def not_saved(folder: Path, error: BaseException) -> StorageError:
    """Of this save, or of one before it in the background: the error does not always say which."""
    full, text = os.strerror(errno.ENOSPC), reason(error)
    # the layers below repeat the names of their files until nobody finds the reason
    return StorageError(f"{folder}: saving failed: {full if full in text else text}")


def reason(error: BaseException) -> str:
    """An exception's first line, not too long; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


_copy = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays])


def copied(tree: PyTree) -> PyTree:
    """The tree with its device arrays copied, in one program; what is on the host is left there."""
    leaves, structure = jax.tree.flatten(tree)
    copies = iter(_copy([leaf for leaf in leaves if isinstance(leaf, jax.Array)]))
    kept = [next(copies) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, kept)

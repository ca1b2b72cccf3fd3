"""The checkpoints of a run: saved whole, trusted when they verify."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax

import jaxdp
from jaxdp.checkpoints import engine, files, folders, leaves, manifest
from jaxdp.checkpoints.agreement import any_process, of_the_first, the_first_does
from jaxdp.checkpoints.files import DamageError
from jaxdp.checkpoints.manifest import Manifest
from jaxdp.checkpoints.restoring import restore_step, verified
from jaxdp.checkpoints.retention import Keep, steps_to_delete
from jaxdp.errors import StorageError
from jaxdp.state import AS_IT_IS, SavedForm, TrainState
from jaxdp.trees import named_leaves

Verify = Literal["fast", "thorough"]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Checkpoints:
    """The checkpoints of one run: a folder per step, written in the background.

    Use as a context manager: leaving it waits until the last save is complete.  In several
    processes all of them call each method together; the first alone writes manifests, and moves
    and deletes.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | Keep = 3,
        form: SavedForm = AS_IT_IS,
        verify: Verify = "fast",
    ):
        """Opens or creates `folder`.

        Args:
          folder: of all steps; what a killed save left in it is removed.
          keep: so many of the newest steps are kept, or what these rules keep.
          form: the step's, in which a state is kept.
          verify: "fast" verifies the step that is restored: its files, and then its leaves;
            "thorough" also reads back what was just written, before it counts, and at a restore
            looks at the files of all other steps.

        Raises:
          StorageError: the folder cannot be created.
        """
        self.folder, self._form, self._verify = folder.absolute(), form, verify
        self._keep = Keep(keep) if isinstance(keep, int) else keep
        self._current: int | None = None  # the step that was saved or restored last
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if _is_first():
                folders.remove_leftovers(self.folder)
            self._writer = engine.Writer(self.folder)
        except OSError as error:
            raise StorageError(f"{folder}: cannot hold checkpoints: {error}") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._writer.close()
        except Exception as error:
            if kind is None:  # else the exception that is on its way says more
                if isinstance(error, StorageError):
                    raise
                raise engine.not_saved(self.folder, error) from error

    def steps(self) -> list[int]:
        """The steps that are there, oldest first; whether they verify is seen at a restore.

        Raises:
          StorageError: the folder cannot be listed.
        """
        try:
            return folders.steps_in(self.folder)
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be listed: {error.strerror}") from error

    def save(self, step: int, state: TrainState, meta: dict[str, Any] | None = None) -> None:
        """Starts saving; returns as soon as `state` may be donated.

        Args:
          step: its number, above those that are there.
          state: what is saved.
          meta: what the run wants to be kept besides, plain values of JSON; comes back from
            `restore`.

        Raises:
          StorageError: this save, or an earlier one in the background, failed; or a later step is
            there, or this one, saved by something else.
        """
        self.wait()
        if step == self._current:
            return  # resumed there and stopped before the next step
        if (there := self.steps()) and there[-1] >= step:
            later = "a later step is" if there[-1] > step else "a checkpoint of that step is"
            raise StorageError(f"{self.folder / str(step)}: not saved: {later} there")
        run = json.loads(json.dumps(meta or {}))  # as it is now: the caller goes on with its own
        # a copy, since Orbax may read CPU buffers in place while the next step reuses them
        snapshot = engine.copied(self._form.saved(state)._asdict())
        leaves.check_names(snapshot)
        spread = leaves.spread_leaves(snapshot)  # digests of the others are made in the background

        def complete(folder: Path) -> None:
            table = leaves.leaf_table(snapshot, spread)
            if self._verify == "thorough":
                leaves.check_same(table, leaves.leaf_table(engine.read_leaves(folder)))
            written = files.entries(folder, manifest.payload(folder))
            manifest.write(folder, Manifest(step, table, written, _facts(snapshot), run))
            folders.publish(self.folder, step)
            with suppress(StorageError):  # this one counts; the others go after the next
                self._delete_old()

        self._writer.start(step, snapshot, complete if _is_first() else lambda folder: None)
        self._current = step

    def _delete_old(self) -> None:
        """What the rules do not keep; what has no manifest is not ours to delete, or to count."""
        values: dict[int, float | None] = {}
        for step in self.steps():
            # damaged, or written by a later version: it neither counts nor goes
            with suppress(DamageError, StorageError):
                evaluation = manifest.read(self.folder / str(step)).run.get("evaluation", {})
                values[step] = evaluation.get(self._keep.best)
        for step in steps_to_delete(values, self._keep):
            folders.delete(self.folder, step)

    @property
    def failure(self) -> StorageError | None:
        """Of a save in the background of this process, which the next call will raise."""
        return self._writer.failure

    def wait(self) -> None:
        """Returns when every save is complete on disk.

        Raises:
          StorageError: one failed.
        """
        failure = None
        try:
            self._writer.wait()
        except StorageError as error:
            failure = error
        if any_process(failure is not None):
            self._current = None
            raise failure or StorageError(f"{self.folder}: saving failed on another process")

    def restore(
        self, like: TrainState, at_most: int | None = None
    ) -> tuple[TrainState, dict[str, Any], list[str]]:
        """The newest state that verifies.

        Its files have to be those that were written, before Orbax reads them, and its leaves to
        the bit those that were saved.  A step of which that is not so is moved to `damaged/` beside
        the checkpoints, never deleted, and the one before it is used.

        Args:
          like: a state of the shapes, dtypes and shardings wanted.
          at_most: the newest step that will do; later ones are moved to `abandoned/`, so that the
            run can save those steps again.

        Returns:
          (state, its meta, a line for each step that was moved aside).

        Raises:
          StorageError: there is none, or a leaf has another shape or dtype.
        """
        self.wait()
        damaged: dict[int, str] = {}
        abandoned = [step for step in self.steps() if at_most is not None and step > at_most]
        for step in self._newest_first(without=abandoned):
            try:
                state, held = restore_step(self.folder / str(step), like, self._form)
            except DamageError as damage:
                damaged[step] = f"checkpoint {step} is damaged: {damage}"
            else:
                self._current = step
                break
        else:
            raise self._nothing_to_trust(damaged)
        # only now: where none can be read, the fault may be the machine's
        lines = the_first_does(lambda: self._tidy_up(step, damaged, abandoned), [])
        return state, held.run, lines

    def _nothing_to_trust(self, damaged: Mapping[int, str]) -> StorageError:
        lines = [*damaged.values(), f"{self.folder}: no checkpoint that can be trusted"]
        if any(manifest.can_be_given_one(self.folder / str(step)) for step in damaged):
            lines.append(
                "checkpoints of versions before manifests can be taken over: python -m "
                "jaxdp.checkpoint adopt RUN"
            )
        return StorageError(*lines)

    def _newest_first(self, without: Collection[int]) -> Iterator[int]:
        """The steps that are there, the same on all processes: as the first of them sees them."""
        there = [step for step in self.steps() if step not in without]
        while (step := of_the_first(there.pop() if there else -1)) >= 0:
            yield step

    def _tidy_up(
        self, restored: int, damaged: Mapping[int, str], abandoned: Sequence[int]
    ) -> list[str]:
        """Moves steps aside, and says so; if told to be thorough, damaged older ones too."""
        older = [step for step in self.steps() if step < restored]
        if self._verify == "thorough":
            damaged = {**damaged, **self._damaged_among(older)}

        def moved(step: int, where: str) -> str:
            try:
                return folders.move_aside(self.folder, step, where)
            except OSError as error:
                raise StorageError(
                    f"{self.folder / str(step)}: cannot be moved to {where}: {error.strerror}"
                ) from error

        lines = [f"{line}; {moved(step, 'damaged')}" for step, line in damaged.items()]
        return lines + [f"checkpoint {step} {moved(step, 'abandoned')}" for step in abandoned]

    def _damaged_among(self, steps: Iterable[int]) -> dict[int, str]:
        """What can be seen of the files of steps that are not restored."""
        found = {}
        for step in steps:
            try:
                with suppress(StorageError):  # a later version wrote it
                    verified(self.folder / str(step))
            except DamageError as damage:
                found[step] = f"checkpoint {step} is damaged: {damage}"
        return found


def _is_first() -> bool:
    return jax.process_index() == 0


def _facts(snapshot: dict[str, Any]) -> dict[str, Any]:
    """When, by what and on what this was saved, and numbers worth seeing without the arrays."""
    slots = [leaf.shape[0] for leaf in jax.tree.leaves(snapshot["sync_state"]) if leaf.ndim]
    arrays = [leaf for leaf in jax.tree.leaves(snapshot) if isinstance(leaf, jax.Array)]
    return {
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "devices": max((len(leaf.sharding.device_set) for leaf in arrays), default=0),
        "processes": jax.process_count(),
        "sync_slots": max(slots, default=0),  # devices that have a part of sync_state of their own
        "loss_scale": {name: float(x) for name, x in named_leaves(snapshot["loss_scale"])},
        "versions": {"jaxdp": jaxdp.__version__, **{name: version(name) for name in _PACKAGES}},
    }

"""TensorBoard files of a run, written by the extra tensorboardX."""

import contextlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxdp.errors import UserError

_QUEUE = 10_000  # numbers that wait to be written


class Board:
    """Writes rows; where a run goes back, what follows replaces what was shown of those steps.

    TensorBoard hides the events from `purge_step` on that older files hold.
    """

    def __init__(self, out: Path, step: int):
        """Opens a file in `out`/tensorboard; rows after `step` are to come."""
        self._out, self._files = out, 0
        self._writer = self._open(step)

    def _open(self, step: int) -> Any:
        from tensorboardX import SummaryWriter  # pyright: ignore  # an extra

        # file names have whole seconds: a second file of the same one would replace the first
        self._files += 1
        suffix = f".{os.getpid()}.{self._files:04d}"
        folder = str(self._out / "tensorboard")
        # the queue is emptied by a thread; a short one blocks us for ever when that thread is gone
        return SummaryWriter(folder, max_queue=_QUEUE, purge_step=step + 1, filename_suffix=suffix)

    def back_to(self, step: int) -> None:
        """The steps after `step` will be written again."""
        self.close()
        self._writer = self._open(step)

    def write(self, row: Mapping[str, Any]) -> str | None:
        """Every number of a row, under its name; those of a mapping as `name/inner`.

        Returns:
          A warning if writing has failed: no more rows can be written then.
        """
        if self._failed():
            return f"{self._out / 'tensorboard'}: cannot be written; training goes on without"
        for name, value in _flat(row):
            self._writer.add_scalar(name, value, row["step"])
        return None

    def close(self) -> None:
        """Writes what is left."""
        if not self._failed():  # else it would wait for ever
            with contextlib.suppress(OSError):  # a full disk
                self._writer.close()

    def _failed(self) -> bool:
        """Whether the writing thread has died, as it does of a full disk."""
        worker = self._writer.file_writer.event_writer._worker
        return not worker.is_alive()


def _flat(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found.append((prefix + name, float(value)))
    return found


def check_tensorboard() -> None:
    """Raises UserError if there is nothing to write TensorBoard files with."""
    if find_spec("tensorboardX") is None:
        raise UserError(
            "log.tensorboard: tensorboardX is not installed; pip install tensorboardX, or set "
            "log.tensorboard false"
        )

"""The folders of a job's attempts: the user's, or temporary ones that are removed."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxdp.errors import UserError
from jaxdp.runtime.children import Janitor


class Folder(NamedTuple):
    """Of one attempt: heartbeats and failures; `kept` if the user asked for it, with all lines."""

    path: Path
    kept: bool


class Folders:
    """Makes a folder for each attempt.

    Args:
      log_dir: the user's; None for temporary folders.
      janitor: removes the temporary ones if this launcher is killed.
      say: is given a warning.
    """

    def __init__(self, log_dir: str | None, janitor: Janitor, say: Callable[[str], None]):
        self._log_dir, self._janitor, self._say = log_dir, janitor, say
        self.temporary: list[Path] = []

    def of_attempt(self, attempt: int) -> Folder:
        """A new folder; a full disk does not keep a job from its restart.

        Raises:
          UserError: the user's folder cannot be used, at the start; or no temporary one can be.
        """
        if self._log_dir is None:
            return Folder(self._temporary(), kept=False)
        try:
            return Folder(next_folder(Path(self._log_dir)), kept=True)
        except OSError as error:
            line = f"--log-dir: {self._log_dir} cannot be used: {error.strerror}"
            if attempt == 0:
                raise UserError(line) from None
            self._say(f"launch: {line}; nothing is kept of this attempt")
            return Folder(self._temporary(), kept=False)

    def _temporary(self) -> Path:
        try:
            folder = Path(tempfile.mkdtemp(prefix="jaxdp-launch-"))
        except OSError as error:
            where = os.environ.get("TMPDIR") or "/tmp"  # Python's own answer may be this error
            raise UserError(
                f"{where}: no temporary folder can be made: {error.strerror}; set TMPDIR, or give "
                "--log-dir"
            ) from None
        self._janitor.note("folder", folder)
        self.temporary.append(folder)
        return folder


@contextlib.contextmanager
def attempt_folders(
    log_dir: str | None, janitor: Janitor, say: Callable[[str], None]
) -> Iterator[Folders]:
    """Yields what makes the folders; those that are temporary do not outlive the block."""
    folders = Folders(log_dir, janitor, say)
    try:
        yield folders
    finally:
        for folder in folders.temporary:
            shutil.rmtree(folder, ignore_errors=True)


def next_folder(parent: Path) -> Path:
    """A new folder `attempt-K`: of other launches with the same --log-dir, none is touched.

    Raises:
      OSError: it cannot be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    numbers = [path.name.removeprefix("attempt-") for path in parent.glob("attempt-*")]
    number = max((int(number) for number in numbers if number.isdigit()), default=-1)
    while True:
        number += 1
        found = parent / f"attempt-{number}"
        with contextlib.suppress(FileExistsError):  # of a launcher that starts just now
            found.mkdir()
            return found.resolve()

"""Holding a run folder: made, locked, and given back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from jaxdp.errors import UserError
from jaxdp.report.runfolder import check_run_folder, create_run_folder
from jaxdp.runtime.lease import NAME, Lease, check_free


def check_not_held(out: Path) -> None:
    """Raises UserError if another run on this machine holds the folder `out`; writes nothing."""
    check_free(out / NAME)


@contextmanager
def held_folder(
    out: Path, resume: bool | str, resuming: bool, tell: Callable[[str], None]
) -> Iterator[Lease | None]:
    """Makes and locks the folder of a run; of several processes, the first does for all.

    Folders that were made and in which nothing is at the end are removed.

    Args:
      out: the run folder.
      resume: as for `check_run_folder`.
      resuming: what it said before the lock was held: a run that ended meanwhile changes it.
      tell: gets a line where a lock of another machine may have to be waited for.

    Yields:
      The lock; None in other processes than the first.

    Raises:
      UserError: another run holds it, or has changed it meanwhile.
      StorageError: it cannot be written.
    """
    if jax.process_index():
        yield None
        return
    made = [path for path in (out / "checkpoints", out, *out.parents) if not path.exists()]
    create_run_folder(out)
    lost = False
    try:
        with Lease(out / NAME, tell=tell) as lease:
            try:
                if check_run_folder(out, resume) != resuming:
                    raise UserError(f"out: another run was in {out} meanwhile; start again")
                yield lease
            finally:
                lost = lease.lost
    finally:
        for path in () if lost else made:
            with suppress(OSError):  # the ones that hold something
                path.rmdir()

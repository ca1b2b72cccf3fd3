"""Holding a run folder: made, locked, and given back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxdp import peers
from jaxdp.errors import UserError
from jaxdp.report.runfolder import check_run_folder, check_shared, create_run_folder
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
      UserError: another run holds it, or has changed it meanwhile, or a process does not see it.
      StorageError: it cannot be written.
    """
    made = [path for path in (out / "checkpoints", out, *out.parents) if not path.exists()]
    taken: list[Lease] = []

    def take() -> None:
        create_run_folder(out)
        taken.append(Lease(out / NAME, tell=tell))
        if check_run_folder(out, resume) != resuming:
            raise UserError(f"out: another run was in {out} meanwhile; start again")

    try:
        peers.from_first(take)
        check_shared(out)
        yield taken[0] if taken else None
    finally:
        for lease in taken:  # who never held the lock leaves what may be another run's
            ours = [] if lease.lost else made
            _remove_empty(path for path in ours if path.parent == out)
            lease.give_back()
            _remove_empty(path for path in ours if path.parent != out)


def _remove_empty(folders: Iterable[Path]) -> None:
    for path in folders:
        with suppress(OSError):  # it holds something
            path.rmdir()

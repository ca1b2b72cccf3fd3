"""The folders of checkpoints: `8` holds step 8, whole; under any other name a save is unfinished.

Deletes nothing but what it named itself, and follows no symbolic link.  Needs no JAX.
"""

import contextlib
import re
import shutil
import time
from pathlib import Path

from jaxdp.checkpoints.files import sync_folder

_QUIET_LOOKS = 3
_STEP = re.compile(r"0|[1-9][0-9]{0,8}")
# what Orbax makes of the name while it writes, and what is on its way out, are ours as well
_LEFTOVER = re.compile(r"(0|[1-9][0-9]*)\.(partial|deleted|orbax-checkpoint-tmp).*")


def step_folder(folder: Path, step: int) -> Path:
    """Where a step is kept."""
    return folder / str(step)


def partial_folder(folder: Path, step: int) -> Path:
    """Where a step is while it is being written."""
    return folder / f"{step}.partial"


def steps_in(folder: Path) -> list[int]:
    """The steps that a folder has something of, oldest first; nothing is said about its state."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def remove_leftovers(folder: Path, step: int | None = None) -> bool:
    """Removes what killed saves and deletions left, of one step or all; whether there was any."""
    found = False
    for path in list(folder.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        ours = match is not None and (step is None or match.group(1) == str(step))
        if ours and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            found = True
    return found


def remove_given_up(folder: Path, step: int, within_s: float = 5.0) -> None:
    """Removes what a save left that has just failed.

    Writes of it may still be on their way, which make their folders anew: it is looked again until
    nothing comes any more, or `within_s` is over.
    """
    ends, quiet = time.monotonic() + within_s, 0
    while quiet < _QUIET_LOOKS and time.monotonic() < ends:
        quiet = 0 if remove_leftovers(folder, step) else quiet + 1
        time.sleep(0.05)


def publish(folder: Path, step: int) -> None:
    """Gives a step that is whole its name."""
    partial_folder(folder, step).rename(step_folder(folder, step))
    sync_folder(folder)


def delete(folder: Path, step: int) -> None:
    """Deletes a step; killed amid, it leaves no half of one under its name."""
    path = step_folder(folder, step)
    if path.is_symlink() or not path.is_dir():
        return
    going = folder / f"{step}.deleted"
    with contextlib.suppress(OSError):  # a step too many does no harm
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def move_aside(folder: Path, step: int, where: str = "damaged") -> str:
    """Moves a step beside the checkpoints; returns where to, in words.

    Raises:
      OSError: it cannot be moved.
    """
    target = folder.parent / where / str(step)
    while target.exists() or target.is_symlink():
        target = target.with_name(target.name + "-again")
    target.parent.mkdir(exist_ok=True)
    step_folder(folder, step).rename(target)
    return f"moved to {target.parent.name}/{target.name}"

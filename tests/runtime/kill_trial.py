"""One training that is killed and started again until it ends: see `kill_points.py`."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fault_trial import result

from jaxdp.checkpoints import manifest
from jaxdp.checkpoints.folders import steps_in
from jaxdp.runtime.phases import INPUT, PHASES

MOMENT, WRITING = "moment", "writing"  # kills from outside
MOST_STARTS = 12
POINTS = (*PHASES, INPUT)  # where a run can be told to kill itself
_LIMIT_S = 300.0  # of one start


class Kill(NamedTuple):
    """How one start is ended: `at` seconds (of the run, or of a save), or in a phase's step."""

    kind: str
    at: float = 0.0
    step: int | None = None

    def is_planned(self) -> bool:
        """Whether the run does it itself; else it comes from outside."""
        return self.kind in POINTS

    def is_due(self, began: float, began_writing: float | None) -> bool:
        """Whether it is time for one from outside, by when the run and its save began."""
        since = began if self.kind == MOMENT else began_writing
        return since is not None and time.monotonic() - since >= self.at

    def fault(self) -> str:
        """Its entry of JAXDP_FAULTS; nothing for one from outside."""
        if not self.is_planned():
            return ""
        return f"0:{'*' if self.step is None else self.step}:{self.kind}:kill"


Start = Callable[[Sequence[str], dict[str, str], Path], int]  # the pid of a run


def forked(argv: Sequence[str], environment: dict[str, str], output: Path) -> int:
    """Starts a run as a fork of this process; returns its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: there is no backend yet
        pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.environ.update(environment)
        code = main_of_a_run(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def started(argv: Sequence[str], environment: dict[str, str], output: Path) -> int:
    """Starts a run as a process of its own; returns its pid."""
    command = [sys.executable, str(Path(__file__)), *argv]
    with open(output, "ab") as file:
        return subprocess.Popen(command, env=os.environ | environment, stdout=file, stderr=file).pid


def main_of_a_run(argv: Sequence[str]) -> int:
    """`jaxdp.train`, which also writes down the examples of each step."""
    from jaxdp import train
    from jaxdp.data.loader import Loader

    batch, notes = Loader.batch, os.environ["EXAMPLES"]

    def noted(self: Loader, step: int, *rows: Any) -> Any:
        ids = self.indices(step, *rows)
        with open(notes, "a") as file:
            file.write(f"{step} {' '.join(map(str, ids))}\n")
        return batch(self, step, *rows)

    Loader.batch = noted
    return train.main(argv)


class Trial:
    """One run in a folder of its own, started as often as it takes."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], start: Start, kills: Sequence[Kill] = ()
    ):
        """Runs nothing yet."""
        self.folder, self.out, self.start = folder, folder / "run", start
        self.kills = list(kills)
        settings = settings | {"out": self.out, "resume": "auto"}
        self.argv = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        self.environment = {
            "JAXDP_FAULTS": ",".join(filter(None, (kill.fault() for kill in kills))),
            "EXAMPLES": str(folder / "examples.txt"),
        }
        folder.mkdir(parents=True)

    def run(self) -> tuple[list[str], str | None]:
        """(the kinds of the kills that met it, what went wrong): until it ends by itself."""
        outside = [kill for kill in self.kills if not kill.is_planned()]
        met: list[str] = []
        for _ in range(MOST_STARTS):
            fired = set(self._fired())
            pid = self.start(self.argv, self.environment, self.folder / "output.txt")
            kill = outside.pop(0) if outside else None
            code = self._wait(pid, kill)
            if code is None:
                return met, f"not over after {_LIMIT_S:g} s"
            if code == -signal.SIGKILL:
                inside = [name.split("-")[1] for name in set(self._fired()) - fired]
                met += inside or ([kill.kind] if kill else ["unknown"])
            elif code:
                return met, f"code {code}"
            else:
                return met, None
        return met, "never came to its end"

    def _fired(self) -> list[str]:
        folder = self.out / ".faults"
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []

    def _wait(self, pid: int, kill: Kill | None) -> int | None:
        """The exit code, negative for a signal; None: it did not end by itself, nor by `kill`."""
        began, began_writing = time.monotonic(), None
        while time.monotonic() - began < _LIMIT_S:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if began_writing is None and self._is_writing():
                began_writing = time.monotonic()
            if kill is not None and kill.is_due(began, began_writing):
                os.kill(pid, signal.SIGKILL)
                kill = None
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None

    def _is_writing(self) -> bool:
        return any((self.out / "checkpoints").glob("*.partial*"))

    def end(self) -> dict[str, Any]:
        """What the run came to, times apart."""
        folder = self.out / "checkpoints"
        newest = steps_in(folder)[-1]
        examples = [row.split(" ", 1) for row in (self.folder / "examples.txt").open()]
        return result(self.out) | {
            "leaves": manifest.read(folder / str(newest)).leaves,
            "checkpoints": sorted(path.name for path in folder.iterdir()),
            "examples": sorted({(int(step), ids) for step, ids in examples}),
            "files": sorted(p.name for p in self.out.iterdir() if p.name != ".faults"),
        }


if __name__ == "__main__":
    sys.exit(main_of_a_run(sys.argv[1:]))

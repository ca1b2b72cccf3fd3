"""What a worker tells the launcher that watches it: where it is, and its stacks when asked."""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from jaxdp.errors import UserError
from jaxdp.runtime.control import CONTROL, Heartbeat, control_folder, heartbeat_file, stacks_file
from jaxdp.runtime.faults import FAULTS, FaultPoints, parse_faults
from jaxdp.runtime.phases import INPUT


class Watch:
    """Tells where this process is; made without arguments, it tells nobody."""

    def __init__(self, rank: int = 0, handle: int | None = None, faults: FaultPoints | None = None):
        """Takes the open heartbeat file, and the fault points, where there are any."""
        self._rank, self._pid = rank, os.getpid()
        self._handle, self._faults = handle, faults
        self._phase, self._step, self._beats = "", 0, 0

    def enter(self, phase: str, step: int) -> None:
        """Begins a phase, or the next step of one; a fault that is planned for here happens.

        Args:
          phase: one of `phases.PHASES`.
          step: counted from 1; at the start and while compiling, the last one that is done.
        """
        self._phase, self._step = phase, step
        self.beat()
        if self._faults is not None:
            self._faults.reach(phase, step)

    def beat(self) -> None:
        """Says that the phase gets on, where one is long and made of parts."""
        # No thread does this by a clock: it would go on while the program is stuck.
        if self._handle is not None:
            self._beats += 1
            at = (self._rank, self._pid, self._phase, self._step)
            record = Heartbeat(*at, time.monotonic(), self._beats).record()
            with contextlib.suppress(OSError):  # a full disk: the training goes on
                os.pwrite(self._handle, record, 0)

    def making_input(self, step: int) -> None:
        """Passes the fault point of the thread that makes batches, before that of a step."""
        if self._faults is not None:
            self._faults.reach(INPUT, step)


@contextlib.contextmanager
def watching(rank: int, out: Path) -> Iterator[Watch]:
    """Watches this process for the length of a `with` block, if a launcher asks for it.

    SIGUSR1 then adds the stacks of all threads to a file in the control folder, whatever the
    program is doing, be it stuck in compiled code.

    Args:
      rank: of this process.
      out: the run folder, which remembers the faults that have happened.

    Raises:
      UserError: JAXDP_FAULTS asks for no faults that we know, or JAXDP_CONTROL is not a folder.
    """
    planned = parse_faults(os.environ.get(FAULTS, ""))
    faults = FaultPoints(planned, rank, out) if planned else None
    folder = control_folder()
    if folder is None:
        yield Watch(rank, faults=faults)
        return
    if not folder.is_dir():
        raise UserError(f"{CONTROL}: no folder {folder}; the launcher makes one for its workers")
    with (
        open(stacks_file(folder, rank), "a") as stacks,
        open(heartbeat_file(folder, rank), "wb") as beats,
    ):
        # before the first beat, which says that SIGUSR1 no longer ends this process
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        try:
            yield Watch(rank, beats.fileno(), faults)
        finally:
            faulthandler.unregister(signal.SIGUSR1)

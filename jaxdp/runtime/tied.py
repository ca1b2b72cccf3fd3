"""Runs a command that ends with its parent: `tied.py PARENT COMMAND ...`, without our package.

The launcher's death by SIGKILL can be seen by no handler; Linux can end a child then, if the child
asks for it.  It asks here, in the process that becomes the worker, and not in a fork of the
launcher, whose other threads may hold locks at that moment.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main() -> None:
    """Asks for SIGKILL at the parent's death, then becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    with contextlib.suppress(OSError, AttributeError):  # not on every system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(128 + signal.SIGKILL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

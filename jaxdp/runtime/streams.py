"""The output streams of a worker."""

import os
import sys


def hide_native_output() -> None:
    """Keeps what libraries write past Python to standard output from ours.

    Gloo greets each of its peers there, between the lines of a run.  Errors go to the other stream,
    and stay.  `print` goes where it went before.
    """
    if sys.stdout is None:  # closed by whoever started us
        return
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)

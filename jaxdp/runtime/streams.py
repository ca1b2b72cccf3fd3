"""The output streams of a worker."""

import os
import sys


def hide_native_output() -> None:
    """Keeps what libraries write past Python from our lines; to be called before JAX starts.

    Gloo greets each of its peers on standard output, and XLA warns on the other stream that it was
    asked to stop.  Errors stay.  `print` goes where it went before.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read once, when JAX is loaded
    if sys.stdout is None:  # closed by whoever started us
        return
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)

"""`python -m jaxdp.launch --nproc-per-node N -m MODULE ...`: the processes of one host.

Imports no JAX: a launcher that had taken the devices could not give them to its processes.
"""

import sys
from collections.abc import Sequence

from jaxdp.errors import exit_code
from jaxdp.runtime.launch_options import parse_options
from jaxdp.runtime.launcher import launch


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return exit_code(lambda: launch(parse_options(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())

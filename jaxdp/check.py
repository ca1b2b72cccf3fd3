"""`python -m jaxdp.check --config FILE`: is this training on N devices the training on one?"""

import sys
from collections.abc import Sequence

from jaxdp.errors import Exit, exit_code, interrupted_at_once

PROG = "python -m jaxdp.check"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return exit_code(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    with interrupted_at_once():
        from jaxdp.config import help_text, load_config, parse_args, to_yaml

    args = parse_args(argv, PROG)
    if args.help:
        print(help_text(prog=PROG))
        return Exit.DONE
    config = load_config(args.config_path, args.overrides)
    if args.print_config:
        print(to_yaml(config), end="")
        return Exit.DONE
    # JAX starts here, after every mistake that can be found without it
    with interrupted_at_once():
        from jaxdp.checking.program import check_and_tell

    return check_and_tell(config)


if __name__ == "__main__":
    sys.exit(main())

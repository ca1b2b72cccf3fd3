"""`python -m jaxdp.train --config FILE [--KEY VALUE ...]`: trains a model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdp.errors import Exit, interrupted_at_once
from jaxdp.runtime.joining import join
from jaxdp.runtime.leaving import run_worker
from jaxdp.runtime.phases import START
from jaxdp.runtime.place import Place
from jaxdp.runtime.stopping import stop_requests
from jaxdp.runtime.watch import Watch, watching

if TYPE_CHECKING:
    from jaxdp.config import Config

PROG = "python -m jaxdp.train"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_worker(lambda place: _main(sys.argv[1:] if argv is None else argv, place))


def _main(argv: Sequence[str], place: Place | None) -> int:
    with interrupted_at_once():
        from jaxdp.config import agreed_keys, help_text, load_config, parse_args, to_yaml

    args = parse_args(argv, PROG)
    if args.help:
        print(help_text(prog=PROG))
        return Exit.DONE
    config = load_config(args.config_path, args.overrides)
    name = Path(args.config_path).stem if args.config_path else "default"
    out = config.out or f"runs/{name}"
    config = config.model_copy(update={"out": out})
    if args.print_config:
        print(to_yaml(config), end="")
        return Exit.DONE
    with watching(place.rank if place else 0, Path(out)) as watch:
        watch.enter(START, 0)
        if place is not None:
            with interrupted_at_once():
                join(place, agreed_keys(config))
        return _train(config, watch)


def _train(config: "Config", watch: Watch) -> int:
    # JAX starts here, after every mistake that can be found without it
    with interrupted_at_once():
        from jaxdp import peers
        from jaxdp.checkpoints.quiet import quiet
        from jaxdp.report.progress import make_reporter
        from jaxdp.training import describe_summary, run_training

    with quiet(), stop_requests(peers.joined()) as stop:
        reporter = make_reporter(config.log.progress if peers.is_first() else "none", config.steps)
        summary = run_training(config, reporter, stop_at=stop.at, watch=watch)
    reporter.line(describe_summary(summary, config.out or ""))
    if not summary["stopped"]:
        return Exit.DONE
    if peers.is_first():
        go_on = "saved; go on with the same command and --resume"
        print(f"{stop.reason()}: {go_on}", file=sys.stderr)
    return Exit.SAVED


if __name__ == "__main__":
    sys.exit(main())

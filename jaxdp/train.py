"""`python -m jaxdp.train --config FILE [--KEY VALUE ...]`: trains a model."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdp.errors import Exit, exit_code, interrupted_at_once
from jaxdp.runtime.phases import START
from jaxdp.runtime.watch import Watch, watching

if TYPE_CHECKING:
    from jaxdp.config import Config

PROG = "python -m jaxdp.train"


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
    name = Path(args.config_path).stem if args.config_path else "default"
    out = config.out or f"runs/{name}"
    config = config.model_copy(update={"out": out})
    if args.print_config:
        print(to_yaml(config), end="")
        return Exit.DONE
    with watching(int(os.environ.get("JAX_PROCESS_ID") or 0), Path(out)) as watch:
        watch.enter(START, 0)
        return _train(config, watch)


def _train(config: "Config", watch: Watch) -> int:
    # JAX starts here, after every mistake that can be found without it
    with interrupted_at_once():
        from jaxdp.report.progress import make_reporter
        from jaxdp.training import describe_summary, run_training

    for name in ("absl", "asyncio"):  # Orbax's steps, and tracebacks of what it raises as well
        logging.getLogger(name).setLevel(logging.CRITICAL)
    reporter = make_reporter(config.log.progress, config.steps)
    with _stop_request() as stop:
        summary = run_training(config, reporter, lambda: bool(stop), watch)
    reporter.line(describe_summary(summary, config.out or ""))
    if summary["stopped"]:
        print(f"{stop[0].name}: saved; go on with the same command and --resume", file=sys.stderr)
        return Exit.SAVED
    return Exit.DONE


@contextmanager
def _stop_request() -> Iterator[list[signal.Signals]]:
    """Yields a list to which the first SIGINT or SIGTERM is added; a second one acts as ever."""
    received: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        received.append(signal.Signals(number))
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()


if __name__ == "__main__":
    sys.exit(main())

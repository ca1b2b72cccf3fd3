"""`python -m jaxdp.compare`: which all-reduce is best on these devices, checked and explained."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxdp.comparison import processes
from jaxdp.errors import UserError, exit_code, interrupted_at_once
from jaxdp.runtime.children import check_count
from jaxdp.sizes import parse_bytes

PROG = "python -m jaxdp.compare"
MODULE = "jaxdp.compare"
_OUTPUTS = ("json", "csv", "plot", "report", "html")
_NOT_WITH_DRAW = ("json", "csv", "plot", "report", "tune", "model", "algorithms")


def _number_of_bytes(text: str) -> int:
    return parse_bytes(text)


_number_of_bytes.__name__ = "number of bytes"  # what argparse calls it in its message


def _names(text: str) -> list[str]:
    if not (found := [name.strip() for name in text.split(",") if name.strip()]):
        raise argparse.ArgumentTypeError("no name was given")
    return found


def _names_or_all(text: str) -> list[str] | None:
    return None if text.strip() == "all" else _names(text)


# flags -> what argparse is told of them
_WHERE: dict[str, dict[str, Any]] = {
    "--devices": {
        "type": int,
        "help": "ranks over all processes, emulated on CPU (default: all there are; 4 on CPU)",
    },
    "--nproc-per-node --nproc": {
        "type": int,
        "default": 1,
        "help": "CPU processes to start here, joined over loopback",
    },
}
_WHAT: dict[str, dict[str, Any]] = {
    "--op": {
        "default": "all_reduce",
        "choices": ["all_reduce", "reduce_scatter", "all_gather", "broadcast"],
        "help": "the collective",
    },
    "--algorithms": {
        "type": _names_or_all,
        "metavar": "A,B",
        "help": "names, auto among them, or all (default)",
    },
    "--dtype": {"default": "float32", "choices": ["float32", "bfloat16", "float16", "int32"]},
    "--redop": {"default": "sum", "choices": ["sum", "max", "min", "product"]},
    "--min-bytes": {
        "type": _number_of_bytes,
        "default": "1K",
        "metavar": "1K",
        "help": "smallest size; K, M, G are powers of 1024",
    },
    "--max-bytes": {
        "type": _number_of_bytes,
        "default": "16M",
        "metavar": "16M",
        "help": "largest size",
    },
    "--factor": {"type": int, "default": 4, "help": "from size to size"},
}
_HOW: dict[str, dict[str, Any]] = {
    "--iters": {"type": int, "default": 20, "help": "samples of each case"},
    "--warmup": {"type": int, "default": 3, "help": "calls before the first sample"},
    "--latency": {
        "action": "store_true",
        "help": "time single calls instead of calls back to back",
    },
    "--seed": {"type": int, "default": 0, "help": "of the inputs"},
    "--model": {
        "metavar": "CONFIG",
        "help": "send the gradients of a configuration's model; the bucket size is the sweep",
    },
}
_FILES: dict[str, dict[str, Any]] = {
    "--json": {"metavar": "FILE", "help": "write rows, model and environment"},
    "--csv": {"metavar": "FILE", "help": "write the rows"},
    "--plot": {"metavar": "FILE.png", "help": "draw times over sizes"},
    "--report": {"metavar": "FILE.html", "help": "write a page: charts, model, rows, players"},
    "--tune": {
        "action": "store_true",
        "help": "keep the fastest of each size for algorithm auto",
    },
    "--tune-file": {"metavar": "FILE", "help": "where (default: the user's cache folder)"},
    "--draw": {
        "type": _names,
        "metavar": "A,B",
        "help": "print the rounds of algorithms, and measure nothing",
    },
    "--html": {"metavar": "FILE.html", "help": "draw them step by step in a page instead"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return exit_code(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    _check(args)
    if args.nproc_per_node > 1 and processes.rank() is None:
        _check_algorithms(args)
        return processes.run_processes(MODULE, argv, args.nproc_per_node)
    return _compare(args)


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {PROG} --help")

    def print_help(self, file: Any = None) -> None:
        """Where it cannot be written, the base class says nothing."""
        print(self.format_help(), end="", file=file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        description="Checks and times collectives side by side, with nccl-tests' conventions.",
        epilog="Exit codes: 0 all right, 2 a mistake in the command, 3 wrong results, 5 storage.",
        allow_abbrev=False,
    )
    for options in (_WHERE, _WHAT, _HOW, _FILES):
        for names, described in options.items():
            parser.add_argument(*names.split(), **described)
    return parser


def _check(args: argparse.Namespace) -> None:
    """Mistakes that can be seen without JAX, a line each."""
    rules = {
        f"--devices: {args.devices}; expected at least 1": args.devices is not None
        and args.devices < 1,
        f"--factor: {args.factor}; expected at least 2": args.factor < 2,
        f"--iters: {args.iters}; expected at least 1": args.iters < 1,
        f"--warmup: {args.warmup}; expected 0 or more": args.warmup < 0,
        f"--min-bytes: {args.min_bytes}; expected at least 1": args.min_bytes < 1,
        f"--max-bytes: {args.max_bytes} is less than --min-bytes {args.min_bytes}": args.max_bytes
        < args.min_bytes,
        "--tune: only all_reduce with float32 and sum is tuned; leave --op, --dtype, --redop and "
        "--model out": args.tune
        and (args.op, args.dtype, args.redop, args.model) != ("all_reduce", "float32", "sum", None),
        f"--seed: {args.seed}; expected 0 or more": args.seed < 0,
        "--tune: psum must be among --algorithms, since auto falls back to it": args.tune
        and "psum" not in (args.algorithms or ["psum"]),
        f"--redop: {args.redop} has no effect on {args.op}": args.redop != "sum"
        and args.op not in ("all_reduce", "reduce_scatter"),
        "--model: only all_reduce sends a model's gradients; leave --op out": bool(args.model)
        and args.op != "all_reduce",
        "--draw: prints rounds and measures nothing; leave the other options out": (
            bool(args.draw) and any(getattr(args, option) for option in _NOT_WITH_DRAW)
        )
        or (bool(args.draw) and args.nproc_per_node != 1),
        "--html: has no effect without --draw": bool(args.html) and not args.draw,
        f"--report: {args.report}; expected a name that ends in .html": bool(args.report)
        and not args.report.lower().endswith((".html", ".htm")),
        "--tune-file: has no effect without --tune": bool(args.tune_file) and not args.tune,
        f"--devices: {args.devices} cannot be spread over {args.nproc_per_node} processes": bool(
            args.devices
        )
        and args.nproc_per_node > 0
        and args.devices % args.nproc_per_node > 0,
    }
    lines = [line for line, broken in rules.items() if broken]
    outputs = {option: path for option in _OUTPUTS if (path := getattr(args, option))}
    lines += [f"--{option}: {why}" for option, path in outputs.items() if (why := _unfit(path))]
    if lines:
        raise UserError(*lines)
    check_count(args.nproc_per_node)
    if args.plot:
        from jaxdp.comparison.plot import check_plot

        check_plot(args.plot)


def _unfit(path: str) -> str | None:
    """Why a file cannot be written there; None if it can, as far as can be seen."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"there is no folder {folder} for {path}"
    if os.path.isdir(path):
        return f"{path} is a folder; expected the name of a file"
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        return f"{path} may not be written"
    return None


def _check_algorithms(args: argparse.Namespace) -> None:
    """Mistakes that every process would report: found once, before they are started."""
    with interrupted_at_once():
        from jaxdp.comparison.run import check_algorithms

    check_algorithms(args.op, args.algorithms, args.devices or args.nproc_per_node)


def _compare(args: argparse.Namespace) -> int:
    # JAX starts here, after every mistake that can be found without it
    with interrupted_at_once():
        from jaxdp.comparison.session import compare_and_tell, draw

    if args.draw:
        return draw(args)
    return compare_and_tell(args)


if __name__ == "__main__":
    sys.exit(main())

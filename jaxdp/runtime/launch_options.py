"""The command line of the launcher; torchrun's names where it has them."""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from jaxdp.errors import UserError
from jaxdp.runtime.children import check_count, cores
from jaxdp.runtime.modules import check_module
from jaxdp.runtime.phases import COMPILE, END, EVALUATION, SAVE, START, STEP

PROG = "python -m jaxdp.launch"
# seconds without a heartbeat; what each phase waits for
DEADLINES = {
    START: (900, "joining the others, reading data, restoring the state"),
    COMPILE: (1800, "compiling the step"),
    STEP: (600, "a step, and waiting for its input"),
    EVALUATION: (1800, "a batch of the evaluation"),
    SAVE: (1800, "a save"),
    END: (300, "the report, and leaving together"),
}
_EPILOG = """\
Everything after -m is the program and its arguments, as `python -m` takes them.  Each process
gets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; to jaxdp.train, --resume auto
is added.  Lines of rank R are shown as `[R] line`; standard input is empty.

SIGTERM, SIGINT (Ctrl-C) and SIGHUP ask all ranks to save and end, and kill them after the grace;
a second Ctrl-C kills at once.  When a rank fails, the others are ended within a second, and what
failed first is told.

Read from the environment: JAXDP_JOIN_TIMEOUT, seconds for which ranks wait for each other at the
start (300), and JAXDP_FAULTS, for tests.

Exit codes: 0 done, 1 a rank failed, 2 a mistake in the command or the configuration, 3 wrong
results, 4 numerics, 5 storage, 6 a rank was lost or stuck, 75 saved on request (run it again),
128+n ended by signal n.  0, 2, 3, 4, 5 and 75 end the job, and so does a request to one rank: one
that ends by SIGTERM, SIGINT or SIGHUP, or with 128+n of these.  Every other code is restarted.
"""


@dataclass(frozen=True)
class LaunchOptions:
    """What a command line asks for.

    Attributes:
      module, arguments: what every rank runs, as `python -m` would.
      nproc: processes of each host.
      nnodes, node_rank: hosts, and which of them this is.
      coordinator: HOST:PORT; None is a free port of this host's loopback.
      coordinator_bind: the address at which rank 0 listens; None is the coordinator's.
      max_restarts: restarts without progress in between.
      min_nproc: as few processes as this may go on; None is never fewer.
      grace_s: from the request to end until SIGKILL.
      deadlines: seconds without a heartbeat, by phase.
      log_dir: a folder for the lines of each rank; None keeps none.
      pin: whether processes are pinned to cores.
    """

    module: str
    arguments: tuple[str, ...]
    nproc: int
    nnodes: int
    node_rank: int
    coordinator: str | None
    coordinator_bind: str | None
    max_restarts: int
    min_nproc: int | None
    grace_s: float
    deadlines: dict[str, float]
    log_dir: str | None
    pin: str


def parse_options(argv: Sequence[str]) -> LaunchOptions:
    """Reads the command line.

    Raises:
      UserError: with a line for each mistake; nothing has been started.
    """
    ours, program = _split(argv)
    args, unknown = _parser().parse_known_args([_spelt(word) for word in ours])
    if unknown:
        raise UserError(*(_unknown(word) for word in unknown if _is_told(word, unknown)))
    if not program:
        raise UserError(f"no program: expected -m MODULE at the end, see {PROG} --help")
    _check(args)
    check_module(program[0])
    return LaunchOptions(
        module=program[0],
        arguments=tuple(program[1:]),
        nproc=args.nproc_per_node,
        nnodes=args.nnodes,
        node_rank=args.node_rank or 0,
        coordinator=args.coordinator,
        coordinator_bind=args.coordinator_bind,
        max_restarts=args.max_restarts,
        min_nproc=args.min_nproc,
        grace_s=args.grace,
        deadlines={phase: getattr(args, f"{phase}_deadline") for phase in DEADLINES},
        log_dir=args.log_dir,
        pin=args.pin,
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the program with its arguments after the first -m."""
    for i, word in enumerate(argv):
        if word in ("-m", "--module"):
            return list(argv[:i]), list(argv[i + 1 :])
    return list(argv), []


def _spelt(word: str) -> str:
    """--nproc_per_node is --nproc-per-node, as with torchrun."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {PROG} --help")

    def print_help(self, file: Any = None) -> None:
        """Where it cannot be written, the base class says nothing."""
        print(self.format_help(), end="", file=file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        usage=f"{PROG} [options] -m MODULE [arguments]",
        description="Starts, watches and restarts the processes of one host.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_places(parser.add_argument_group("which processes"))
    _add_ends(parser.add_argument_group("how they end"))
    add = parser.add_argument_group(
        "deadlines: seconds without a heartbeat, of programs that send them, as jaxdp.train does"
    ).add_argument
    for phase, (seconds, what) in DEADLINES.items():
        add(f"--{phase}-deadline", type=_seconds, default=float(seconds), metavar="S",
            help=f"{what} (default {seconds})")  # fmt: skip
    return parser


def _add_places(group: Any) -> None:
    add = group.add_argument
    add("-m", "--module", help="what to run, with its arguments; comes last")
    add("--nproc-per-node", "--nproc", type=int, default=1, metavar="N",
        help="processes of this host (default 1)")  # fmt: skip
    add("--nnodes", type=int, default=1, metavar="N", help="hosts; start a launcher on each")
    add("--node-rank", type=int, metavar="R", help="which of the hosts this is, from 0")
    add("--coordinator", metavar="HOST:PORT",
        help="where the ranks meet, on host 0 (default: a free port of loopback)")  # fmt: skip
    add("--coordinator-bind", metavar="ADDRESS",
        help="at which address it listens (default: that of HOST)")  # fmt: skip
    add("--pin", choices=["auto", "on", "off"], default="auto",
        help="each process to its share of the cores; auto: where it computes on CPU")  # fmt: skip
    add("--log-dir", metavar="DIR", help="keep every rank's lines in DIR/attempt-K/rank-R.log")


def _add_ends(group: Any) -> None:
    add = group.add_argument
    add("--max-restarts", type=int, default=3, metavar="N",
        help="restarts without a step farther than before (default 3); three failures at one step "
        "in a row end the job before")  # fmt: skip
    add("--min-nproc", type=int, metavar="M",
        help="go on with a process fewer, down to M, if a restart makes no new step")  # fmt: skip
    add("--grace", type=_seconds, default=30.0, metavar="S",
        help="seconds to save and end, when asked to (default 30)")  # fmt: skip


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"  # what argparse calls it in its message


def _is_told(word: str, unknown: Sequence[str]) -> bool:
    """Of an unknown option and its value, the option is told."""
    return word.startswith("-") or not any(other.startswith("-") for other in unknown)


def _unknown(word: str) -> str:
    if not word.startswith("-"):
        hint = f"expected -m MODULE, see {PROG} --help"
        if word.endswith(".py"):
            module = word.removesuffix(".py").removeprefix("./").replace("/", ".")
            hint = f"a file is run as a module: -m {module}"
        return f"{word}: not an option; {hint}"
    name = word.partition("=")[0]
    known = [o for a in _parser()._actions for o in a.option_strings if o.startswith("--")]
    close = get_close_matches(name, known, n=1)
    if close:
        return f"{name}: no such option; did you mean {close[0]}?"
    return f"{name}: no such option; the program's own come after -m MODULE, see {PROG} --help"


def _check(args: argparse.Namespace) -> None:
    check_count(args.nproc_per_node)
    several = args.nnodes > 1
    rules = {
        f"--nnodes: {args.nnodes}; expected at least 1": args.nnodes < 1,
        "--coordinator: missing; with --nnodes above 1 give HOST:PORT of a free port of host 0": (
            several and args.coordinator is None
        ),
        f"--node-rank: missing; expected which of the {args.nnodes} hosts this is, 0 to "
        f"{args.nnodes - 1}": several and args.node_rank is None,
        f"--node-rank: {args.node_rank}; expected 0 to {args.nnodes - 1}": (
            args.nnodes > 0 and args.node_rank is not None and not 0 <= args.node_rank < args.nnodes
        ),
        f"--max-restarts: {args.max_restarts}; expected 0 or more": args.max_restarts < 0,
        f"--min-nproc: {args.min_nproc}; expected 1 to {args.nproc_per_node}": (
            args.min_nproc is not None and not 1 <= args.min_nproc <= args.nproc_per_node
        ),
        "--coordinator-bind: only with --coordinator; give its HOST:PORT too, or leave this out": (
            args.coordinator_bind is not None and args.coordinator is None
        ),
        "--min-nproc: only on one host; leave --nnodes out": several and args.min_nproc is not None,
    }
    lines = [line for line, broken in rules.items() if broken]
    if args.coordinator is not None and (fault := _address_fault(args.coordinator)):
        lines.append(f"--coordinator: {args.coordinator}: {fault}")
    if args.pin == "on" and args.nproc_per_node > len(cores()):
        lines.append(
            f"--pin on: {args.nproc_per_node} processes on {len(cores())} cores; expected one each"
        )
    if fault := _log_dir_fault(args.log_dir):
        lines.append(f"--log-dir: {args.log_dir} {fault}")
    if lines:
        raise UserError(*lines)


def _address_fault(address: str) -> str | None:
    """What is wrong with HOST:PORT or [IPv6]:PORT; None for nothing."""
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        return "expected HOST:PORT"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "expected [ADDRESS]:PORT for an IPv6 address"
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65_535:
        return f"port {port} does not exist; expected 1 to 65535"
    return None


def _log_dir_fault(log_dir: str | None) -> str | None:
    if log_dir is None:
        return None
    for path in (Path(log_dir), *Path(log_dir).parents):
        if path.is_dir():
            return None if os.access(path, os.W_OK | os.X_OK) else "cannot be written"
        if path.exists():
            return f"is no folder: {path} is a file" if path != Path(log_dir) else "is a file"
    return None

"""One run of the program: devices, sweep, table, files."""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import jax

from jaxdp.collectives import Schedule, algorithms_for, get_algorithm, make_schedule, tuning
from jaxdp.comparison import files, processes, text
from jaxdp.comparison.payload import gradient_buckets
from jaxdp.comparison.run import Comparison, check_algorithms, run_compare
from jaxdp.errors import Exit, UserError
from jaxdp.mesh import use_devices
from jaxdp.report import animate
from jaxdp.types import Device

_CPU_DEVICES = 4  # emulated where nothing is said and there is only the CPU


def compare_and_tell(args: argparse.Namespace) -> int:
    """Compares as the command line says; returns the exit code."""
    buckets = None
    if args.model:
        buckets = gradient_buckets(args.model, _sizes(args), args.dtype)
    devices = _devices(args)
    check_algorithms(args.op, args.algorithms, len(devices))
    first = jax.process_index() == 0
    say: Callable[[str], None] = partial(print, flush=True) if first else lambda text: None
    say(text.COLUMNS)
    comparison = run_compare(
        devices,
        op=args.op,
        algorithms=args.algorithms,
        dtype=args.dtype,
        redop=args.redop,
        sizes=_sizes(args),
        buckets=buckets,
        iters=args.iters,
        warmup=args.warmup,
        latency=args.latency,
        seed=args.seed,
        progress=_progress if first and sys.stderr.isatty() else lambda text: None,
        on_row=lambda row: say(text.line(row)),
    )
    say(text.UNITS)
    say(text.facts_line(comparison.facts))
    for line in text.footer(comparison):
        say(line)
    if first:
        _write(comparison, args, len(devices))
    return Exit.FAULT_FOUND if comparison.wrong else Exit.DONE


def _write(comparison: Comparison, args: argparse.Namespace, n: int) -> None:
    if args.json:
        files.write_json(comparison, args.json)
    if args.csv:
        files.write_csv(comparison, args.csv)
    if args.plot:
        from jaxdp.comparison.plot import write_plot  # matplotlib is an extra

        write_plot(comparison, args.plot)
    if args.report:
        from jaxdp.comparison.page import comparison_page

        comparison_page(comparison).save(args.report)
    if args.tune:
        print(f"tuned: {tuning.save(comparison.rows, n, args.tune_file)}")


def _devices(args: argparse.Namespace) -> list[Device]:
    if processes.rank() is None:
        return use_devices(args.devices or "auto", cpu_default=_CPU_DEVICES)
    processes.join((args.devices or args.nproc_per_node) // args.nproc_per_node)
    return jax.devices()


def _sizes(args: argparse.Namespace) -> list[int]:
    sizes = [args.min_bytes]
    while sizes[-1] * args.factor <= args.max_bytes:
        sizes.append(sizes[-1] * args.factor)
    return sizes


def _progress(what: str) -> None:
    sys.stderr.write(f"\r\x1b[K{what} ...\r")
    sys.stderr.flush()


def draw(args: argparse.Namespace) -> int:
    """Prints the rounds of algorithms, or writes a page that plays them."""
    n = args.devices or _CPU_DEVICES
    known = algorithms_for(args.op, scheduled=True)
    for name in args.draw:
        if name not in known:
            raise UserError(
                f"--draw: {name} has no schedule for {args.op}; expected some of {', '.join(known)}"
            )
    if args.html:
        page = animate(*args.draw, n=n, op=args.op, nbytes=args.max_bytes)
        page.save(args.html)
        print(f"{args.html}: {len(page.html) / 1024:.0f} KiB; open it in a browser")
        return Exit.DONE
    print("a>b c3+ : rank a sends chunk 3 to rank b, which adds it; = : which keeps it")
    for name in args.draw:
        _print_rounds(name, make_schedule(name, args.op, n))
    return Exit.DONE


def _print_rounds(name: str, schedule: Schedule) -> None:
    print(f"{name}: {get_algorithm(name).about}")
    print(
        f"{schedule.result}, {schedule.n} ranks, {schedule.chunks} chunks, "
        f"{len(schedule.rounds)} rounds"
    )
    for number, transfers in enumerate(schedule.rounds, 1):
        words = [
            f"{a}>{b} {','.join(f'c{c}' for c in sent)}{'+' if transfer.reduce else '='}"
            for transfer in transfers
            for (a, b), sent in zip(transfer.pairs, transfer.chunks, strict=True)
        ]
        print(f"round {number:>3}  {'   '.join(words)}")

"""`python -m jaxdp.checkpoint`: lists, verifies, shows, compares, exports a run's checkpoints."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from jaxdp.checkpoints import inspect
from jaxdp.checkpoints.files import DamageError
from jaxdp.checkpoints.folders import step_folder, steps_in
from jaxdp.checkpoints.manifest import can_be_given_one
from jaxdp.checkpoints.quiet import quiet
from jaxdp.errors import Exit, UserError, exit_code, interrupted_at_once
from jaxdp.wording import counted

PROG = "python -m jaxdp.checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return exit_code(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    with quiet():
        return args.run_command(args)


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        """Where it cannot be written, the base class says nothing."""
        print(self.format_help(), end="", file=file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        description="Lists, verifies, shows, compares and exports the checkpoints of a run.",
        epilog="Exit codes: 0 all right, 2 a mistake in the command, 3 something is damaged or "
        "differs, 5 storage.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Callable[[argparse.Namespace], int], help_: str) -> Any:
        one = commands.add_parser(name, help=help_, description=help_, allow_abbrev=False)
        one.set_defaults(run_command=run)
        one.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
        return one

    command("list", _list, "the steps, with size, age and state as far as sizes of files tell")
    verify = command("verify", _verify, "holds every file against the digest that was saved")
    verify.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    verify.add_argument(
        "--thorough", action="store_true", help="also reads the values and verifies each leaf"
    )
    show = command("show", _show, "what a step holds: where it was saved, and its leaves")
    show.add_argument("step", nargs="?", default=inspect.NEWEST, metavar="STEP")
    show.add_argument("--norms", action="store_true", help="reads the values, for their norms")
    diff = command("diff", _diff, "the leaves in which two steps differ, and by how much")
    diff.add_argument("a", metavar="STEP", help="a number, or newest")
    diff.add_argument("b", metavar="STEP")
    diff.add_argument("--with", dest="other", type=Path, metavar="RUN", help="the second step's")
    export = command("export", _export, "writes a step's parameters as a safetensors file")
    export.add_argument("file", type=Path, metavar="FILE", help="is not there yet")
    export.add_argument("--step", default=inspect.NEWEST, metavar="STEP", help="default: newest")
    adopt = command(
        "adopt", _adopt, "gives steps of versions before manifests one, after reading them whole"
    )
    adopt.add_argument("steps", nargs="*", metavar="STEP", help="default: all that have none")
    return parser


def _list(args: argparse.Namespace) -> int:
    folder = inspect.checkpoints_of(args.run)
    found = [inspect.look(folder, step, digests=False) for step in steps_in(folder)]
    print("\n".join(inspect.table(filter(None, found))))
    return Exit.DONE


def _verify(args: argparse.Namespace) -> int:
    folder = inspect.checkpoints_of(args.run)
    steps = [inspect.find_step(folder, step) for step in args.steps] or steps_in(folder)
    damaged = later = 0
    for step in steps:
        found = inspect.look(folder, step, digests=True)
        if found is not None and args.thorough:
            found = _thoroughly(folder, found)
        print(inspect.verdict(found) if found else f"step {step}: deleted meanwhile")
        damaged += found is not None and found.damage is not None
        later += found is not None and found.later is not None
    if damaged:
        print(f"{counted(damaged, 'step')} of {len(steps)} damaged; a resume takes the newest "
              "that is not, and moves newer ones to damaged/", file=sys.stderr)  # fmt: skip
    return Exit.FAULT_FOUND if damaged else Exit.STORAGE if later else Exit.DONE


def _thoroughly(folder: Path, found: inspect.Finding) -> inspect.Finding:
    """The same after each value has been read."""
    if found.held is None or found.damage:
        return found
    try:
        _contents().verify_leaves(step_folder(folder, found.step), found.held)
    except DamageError as damage:
        return replace(found, damage=str(damage))
    return replace(found, thoroughly=True)


def _show(args: argparse.Namespace) -> int:
    folder = inspect.checkpoints_of(args.run)
    step = inspect.find_step(folder, args.step)
    held = inspect.manifest_of(folder, step)
    norms = _contents().norms(step_folder(folder, step), held) if args.norms else None
    print("\n".join([*inspect.describe(held), "", *inspect.leaf_lines(held, norms)]))
    return Exit.DONE


def _diff(args: argparse.Namespace) -> int:
    one = inspect.checkpoints_of(args.run)
    other = inspect.checkpoints_of(args.other) if args.other else one
    a, b = inspect.find_step(one, args.a), inspect.find_step(other, args.b)
    held_a, held_b = inspect.manifest_of(one, a), inspect.manifest_of(other, b)
    paths = step_folder(one, a), step_folder(other, b)
    found = []
    if held_a.leaves != held_b.leaves:
        found = _contents().differences(paths[0], held_a, paths[1], held_b)
    else:  # JAX need not be started to find the files as they were saved
        inspect.check_sound(paths[0], held_a)
        inspect.check_sound(paths[1], held_b)
    for name, words in found:
        print(f"{name}: {words}")
    count = counted(len(held_a.leaves.keys() | held_b.leaves.keys()), "leaf")
    print(f"{len(found)} of {count} differ" if found else f"{count}, all the same to the bit")
    return Exit.FAULT_FOUND if found else Exit.DONE


def _adopt(args: argparse.Namespace) -> int:
    folder = inspect.checkpoints_of(args.run)
    steps = [inspect.find_step(folder, step) for step in args.steps]
    steps = steps or [s for s in steps_in(folder) if can_be_given_one(step_folder(folder, s))]
    if not steps:
        raise UserError(f"{folder}: every step has a manifest; nothing to take over")
    for step in steps:
        held = _contents().adopt(step_folder(folder, step))
        print(f"step {step}: {counted(len(held.leaves), 'leaf')}, manifest written")
    return Exit.DONE


def _export(args: argparse.Namespace) -> int:
    folder = inspect.checkpoints_of(args.run)
    step = inspect.find_step(folder, args.step)
    held = inspect.manifest_of(folder, step)
    count = _contents().export(step_folder(folder, step), held, args.file)
    print(f"step {step}: {counted(count, 'array')} in {args.file}")
    return Exit.DONE


def _contents() -> Any:
    """The module that reads values.  JAX starts here, and needs no accelerator for that."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with interrupted_at_once():
        from jaxdp.checkpoints import contents

    return contents


if __name__ == "__main__":
    sys.exit(main())

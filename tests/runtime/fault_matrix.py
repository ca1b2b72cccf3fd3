"""Everything that can go wrong with a job, one after the other: does it come through?

    python tests/runtime/fault_matrix.py [--trials N | --minutes M] [--seed S] [--only WORD]

Each trial runs a short training of two processes under the launcher, lets one fault happen, and
asks: did it come through, and is the end that of the undisturbed run, to the bit?

    a fault      the launcher restarts the job by itself, and ends with 0
    a request    (SIGTERM, SIGINT) it saves and ends with 75; the same command goes on to the end

After each: no process, no listening port and no temporary file of the job is left.  Times are of
this machine: on one that does other work they say little.  Exit code 3 if a trial failed.
"""

import argparse
import itertools
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fault_trial import LAUNCHER, REQUESTS, SIGNALS, Case, Seen, Trial, result

from jaxdp.errors import Exit
from jaxdp.runtime.faults import ACTIONS
from jaxdp.runtime.phases import COMPILE, END, EVALUATION, INPUT, PHASES, SAVE, START, STEP

STEPS, EVERY = 24, 8  # of the run; between evaluations, and between saves
LAST = STEPS - EVERY  # the latest step of a fault: after a request there is time to notice it
DEAD, STUCK = ("kill", "raise", "exit"), ("stop", "hang")
WAYS = [action for action in ACTIONS if action != "slow"]
GRACE_S = 30.0
TRAIN = [
    "--devices", "2", "--model.hidden", "[16]", "--global_batch", "48", "--steps", STEPS,
    "--optimizer.warmup_steps", "0", "--log.every", "1", "--log.progress", "plain",
    "--eval.every", EVERY, "--checkpoint.every", EVERY,
]  # fmt: skip


class Verdict(NamedTuple):
    """What a trial showed: `why` it failed, or None; seconds, or None where there are none."""

    case: Case
    why: str | None
    gone_s: float | None
    next_step_s: float | None


def cases(rng: np.random.Generator, nproc: int) -> list[Case]:
    """Every action in every phase at every rank, and at the launcher those that are signals."""
    targets = (*range(nproc), LAUNCHER)
    found = [
        Case(action, phase, target, a_step(phase, rng))
        for action, phase, target in itertools.product(WAYS, (*PHASES, INPUT), targets)
        if target != LAUNCHER or (action in SIGNALS and phase != INPUT)
    ]
    return [found[i] for i in rng.permutation(len(found))]


def a_step(phase: str, rng: np.random.Generator) -> int | None:
    """A step in which the phase is entered; None where there is one in a run."""
    if phase in (STEP, INPUT):
        return int(rng.integers(2, LAST + 1))
    return int(rng.choice(range(EVERY, STEPS + 1, EVERY))) if phase in (EVALUATION, SAVE) else None


def deadlines(args: argparse.Namespace) -> dict[str, float]:
    """Seconds without a heartbeat, by phase; an input that hangs is a step that does."""
    slow = {START: args.start_deadline, COMPILE: args.start_deadline}
    return dict.fromkeys((*PHASES, INPUT), args.deadline) | slow


def judge(case: Case, seen: Seen, found: dict, wanted: dict, deadline_s: float) -> str | None:
    """Why a trial failed; None if the job came through."""
    if seen.fault is None:
        return "the fault did not happen"
    if seen.left:
        return f"left: {'; '.join(seen.left)}"
    if why := _codes(case, seen):
        return why
    if found != wanted:
        different = [name for name in wanted if found.get(name) != wanted[name]]
        return f"another end than the undisturbed run's: {', '.join(different) or 'no summary'}"
    gone_s = seen.gone_s()
    if gone_s is None:
        return "a rank was not seen to go"
    most = GRACE_S if case.action in REQUESTS else deadline_s + 5 if case.action in STUCK else 5
    return f"the last rank was gone after {gone_s:.1f} s" if gone_s > most else None


def _codes(case: Case, seen: Seen) -> str | None:
    """Whether the commands ended as they should."""
    killed = case.target == LAUNCHER and case.action == "kill"
    if not killed and case.action not in REQUESTS:
        restarted = len(seen.attempts) > 1 or case.phase == END
        return None if seen.codes == [0] and restarted else f"not restarted: codes {seen.codes}"
    first = {-SIGNALS["kill"]} if killed else {Exit.SAVED}
    if not killed and case.phase in (START, END):  # nothing to save yet, or all saved
        first |= {128 + SIGNALS[case.action]}
    if not killed and (case.phase == END or case.step == STEPS):
        first |= {0}  # there is no later step to stop at
    if seen.codes == [0] and 0 in first:
        return None
    return None if seen.codes[0] in first and seen.codes[1:] == [0] else f"codes {seen.codes}"


def run_case(case: Case, folder: Path, args: argparse.Namespace, wanted: dict) -> Verdict:
    """One trial, in a folder of its own, which stays if it fails."""
    trial = Trial(case, folder, launch_options(args), [str(word) for word in TRAIN])
    again = [-SIGNALS["kill"], Exit.SAVED, *(128 + number for number in SIGNALS.values())]
    try:
        seen = trial.run(again)
        why = judge(case, seen, result(trial.out), wanted, deadlines(args)[case.phase])
    finally:
        trial.end()
    if why is None:
        shutil.rmtree(folder)
    return Verdict(case, why, seen.gone_s(), seen.next_step_s())


def launch_options(args: argparse.Namespace) -> list[str]:
    words = ["--nproc", str(args.nproc), "--grace", str(GRACE_S)]
    for phase, seconds in deadlines(args).items():
        words += [] if phase == INPUT else [f"--{phase}-deadline", str(seconds)]
    return words


def undisturbed(folder: Path, args: argparse.Namespace) -> dict:
    """What the run comes to when nothing happens; leaves if it does not come to its end."""
    trial = Trial(None, folder, launch_options(args), [str(word) for word in TRAIN])
    try:
        seen = trial.run(())
    finally:
        trial.end()
    if seen.codes != [0] or seen.left:
        print((folder / "output.txt").read_text())
        sys.exit(f"the undisturbed run: codes {seen.codes}, left: {seen.left}")
    return result(trial.out)


def table(verdicts: Sequence[Verdict]) -> str:
    """Trials that came through, of all, by action and target down, and by phase across."""
    phases = [*PHASES, INPUT]
    cells: Counter[tuple[str, str, str]] = Counter()
    passed: Counter[tuple[str, str, str]] = Counter()
    for verdict in verdicts:
        case = verdict.case
        key = (case.action, str(case.target), case.phase)
        cells[key] += 1
        passed[key] += verdict.why is None
    lines = ["".join([f"{'':16}", *(f"{phase:>12}" for phase in phases)])]
    targets = sorted({str(verdict.case.target) for verdict in verdicts})
    for action, target in itertools.product(WAYS, targets):
        row = [(action, target, phase) for phase in phases]
        if any(cells[key] for key in row):
            told = [f"{passed[key]}/{cells[key]}" if cells[key] else "" for key in row]
            who = target if target == LAUNCHER else f"rank {target}"
            lines.append("".join([f"{action + ' ' + who:16}", *(f"{text:>12}" for text in told)]))
    return "\n".join(lines)


def times(verdicts: Sequence[Verdict], args: argparse.Namespace) -> str:
    """Seconds from the fault, by kind of fault: medians, 95th percentiles, longest."""

    def over(verdict: Verdict) -> float | None:
        gone = verdict.gone_s
        return None if gone is None else gone - deadlines(args)[verdict.case.phase]

    def of(name: str, actions: Sequence[str], value: Callable[[Verdict], float | None]) -> str:
        chosen = (v for v in verdicts if v.case.action in actions and v.why is None)
        found = [seconds for v in chosen if (seconds := value(v)) is not None]
        if not found:
            return f"{name:54} {'-':>7}"
        p50, p95 = np.percentile(found, [50, 95])
        return f"{name:54} {p50:7.2f} {p95:7.2f} {max(found):7.2f}   {len(found)} trials"

    return "\n".join(
        [
            f"{'seconds':54} {'p50':>7} {'p95':>7} {'max':>7}",
            of("dead peer (kill, raise, exit): to the last rank gone", DEAD, lambda v: v.gone_s),
            of("stuck (stop, hang): the same, beyond the deadline", STUCK, over),
            of("request (term, int): the same", REQUESTS, lambda v: v.gone_s),
            of("dead peer: to the next new step", DEAD, lambda v: v.next_step_s),
        ]
    )


def choose(args: argparse.Namespace) -> list[Case]:
    """The cases to be tried: all of them in a random order, and again where more are wanted."""
    rng, found = np.random.default_rng(args.seed), []
    while not found or len(found) < (args.trials or 0):
        more = [case for case in cases(rng, args.nproc) if args.only in str(case)]
        if not more:
            sys.exit(f"--only {args.only}: no such case; one is {cases(rng, args.nproc)[0]}")
        found += more
    return found[: args.trials]


def run_all(chosen: Sequence[Case], home: Path, args: argparse.Namespace) -> list[Verdict]:
    """A line for each trial, when it is over."""
    ends_at = time.monotonic() + 60 * args.minutes
    wanted, verdicts = undisturbed(home / "undisturbed", args), []
    for i, case in enumerate(chosen):
        if time.monotonic() > ends_at:
            break
        verdict = run_case(case, home / f"trial-{i + 1}", args, wanted)
        verdicts.append(verdict)
        seconds = [f"{s:.2f} s" if s is not None else "-" for s in verdict[2:]]
        said = verdict.why or "came through"
        print(f"{i + 1}/{len(chosen)} {case}: {said}; gone {seconds[0]}, next step {seconds[1]}",
              flush=True)  # fmt: skip
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--trials", type=int, help="how many (default: every case once)")
    add("--minutes", type=float, default=math.inf, help="no trial begins after so long")
    add("--seed", type=int, default=0, help="of the order and of the steps")
    add("--only", default="", help="cases whose description holds this")
    add("--nproc", type=int, default=2, help="processes of the job; 1 or 2")
    add("--deadline", type=float, default=10.0, help="seconds of a step, evaluation, save, end")
    add("--start-deadline", type=float, default=40.0, help="seconds of the start and of compiling")
    add("--keep", type=Path, help="where folders of failed trials stay")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # ends the trial too
    # in the background it is ignored, and so would be in all that is started here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    home = args.keep or Path(tempfile.mkdtemp(prefix="jaxdp-faults-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(home / "cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    verdicts = run_all(choose(args), home, args)
    failed = [verdict for verdict in verdicts if verdict.why]
    print(f"\n{table(verdicts)}\n\n{times(verdicts, args)}\n")
    print(f"{len(verdicts) - len(failed)} of {len(verdicts)} came through; seed {args.seed}")
    if failed:
        print(f"what the others wrote is in {home}")
        return Exit.FAULT_FOUND
    if args.keep is None:
        shutil.rmtree(home)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())

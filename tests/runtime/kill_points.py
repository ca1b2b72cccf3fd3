"""Runs that are killed and go on: is the end that of the straight run, to the bit?

    python tests/runtime/kill_points.py [--trials 200] [--seed S] [--jobs 2]

A trial is a short training that SIGKILL ends one to three times, after each of which the same
command goes on from the last checkpoint:

    moment    at any time, uniformly over the length of a run
    writing   a random time after a save has begun to write
    phase     where a named phase of a random step is entered (`jaxdp/runtime/phases.py`)

At the end these have to be what they are without kills: every leaf of the last checkpoint by its
digest, the checkpoints that are kept, each row of metrics.jsonl (loss, learning rate, held-out
metrics, ...), the examples of each step, what files are there.  Times alone may differ.

Runs are forks of one process that has imported all and started no backend; every tenth trial
starts Python anew each time.  Exit code 3 if a trial failed.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fault_trial import ROOT
from kill_trial import MOMENT, MOST_STARTS, POINTS, WRITING, Kill, Start, Trial, forked, started

from jaxdp.errors import Exit
from jaxdp.runtime.phases import EVALUATION, INPUT, SAVE, STEP

STEPS, EVERY = 12, 3  # of the run; between evaluations, and between saves
MOST_KILLS = 3
SAVE_S = 0.06  # from the beginning of a save to the latest kill in it
KINDS = (MOMENT, WRITING, *POINTS)

COMMON = {
    "steps": STEPS, "devices": 2, "global_batch": 48, "model.hidden": "[16]",
    "model.dropout": 0.2, "optimizer.warmup_steps": 3, "log.every": 1, "log.progress": "none",
    "eval.every": EVERY, "checkpoint.every": EVERY, "checkpoint.keep": 2,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ring, 2 microbatches": {"sync.algorithm": "ring", "microbatches": 2},
    "ZeRO-1": {"sync.shard_optimizer": True},
    "top-k": {"sync.compression": "top_k", "sync.top_k_fraction": 0.1},
    "guard, thorough": {"guard.every": 2, "checkpoint.verify": "thorough"},
    "float16": {"compute_dtype": "float16"},
    "best and every": {"checkpoint.keep_best": "loss", "checkpoint.keep_every": 6},
}


class Verdict(NamedTuple):
    """Of a trial: the kinds of the kills that met the run, and what was wrong, if anything."""

    variant: str
    kinds: tuple[str, ...]
    why: str | None


def draw_kill(rng: np.random.Generator, length_s: float) -> Kill:
    """Of a random kind; half of them are from outside."""
    if rng.random() < 0.5:
        if rng.random() < 0.6:
            return Kill(MOMENT, at=float(rng.uniform(0, length_s)))
        return Kill(WRITING, at=float(rng.uniform(0, SAVE_S)))
    phase = str(rng.choice(POINTS))
    if phase in (STEP, INPUT):
        return Kill(phase, step=int(rng.integers(1, STEPS + 1)))
    if phase in (EVALUATION, SAVE):
        return Kill(phase, step=EVERY * int(rng.integers(1, STEPS // EVERY + 1)))
    return Kill(phase)


def straight(home: Path, variant: str, start: Start) -> tuple[dict[str, Any], float]:
    """(what the run comes to when nothing happens, its seconds once its programs are cached)."""
    for turn in ("first", "second"):
        trial = Trial(home / variant / turn, COMMON | VARIANTS[variant], start)
        began = time.monotonic()
        if (met := trial.run()) != ([], None):
            sys.exit(f"the straight run of {variant}: {met}; see {trial.folder / 'output.txt'}")
    return trial.end(), time.monotonic() - began


def trials(share: int, args: argparse.Namespace, home: Path) -> list[Verdict]:
    """Every `args.jobs`-th trial, beginning with number `share`."""
    wanted = {name: straight(home / f"straight-{share}", name, forked) for name in chosen(args)}
    return [one(number, args, home, wanted) for number in range(share, args.trials, args.jobs)]


def chosen(args: argparse.Namespace) -> list[str]:
    return [name for name in VARIANTS if args.only in name]


def one(
    number: int, args: argparse.Namespace, home: Path, wanted: dict[str, tuple[dict, float]]
) -> Verdict:
    """Trial `number`; drawn anew until a kill has met the run."""
    for again in range(MOST_STARTS):
        rng = np.random.default_rng([args.seed, number, again])
        variant = str(rng.choice(chosen(args)))
        end, length_s = wanted[variant]
        kills = [draw_kill(rng, length_s) for _ in range(rng.integers(1, MOST_KILLS + 1))]
        folder = home / f"trial-{number}-{again}"
        settings = COMMON | VARIANTS[variant]
        trial = Trial(folder, settings, started if number % 10 == 9 else forked, kills)
        met, why = trial.run()
        why = why or different(trial.end(), end)
        if met or why:
            break
        shutil.rmtree(folder)
    if why:
        print(f"trial {number}, {variant}, {', '.join(met)}: {why}; see {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return Verdict(variant, tuple(met), why)


def different(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """In words, what differs; None if nothing does."""
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return f"not as in the straight run: {', '.join(names)}" if names else None


def table(verdicts: Sequence[Verdict]) -> str:
    """Trials that ended as the straight run, of all, by kind of kill and by variant."""
    whole: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for verdict in verdicts:
        for name in {*verdict.kinds, verdict.variant, f"{len(verdict.kinds)} kills"}:
            whole[name] += 1
            passed[name] += verdict.why is None
    names = [name for name in (*KINDS, *VARIANTS) if whole[name]]
    names += sorted(name for name in whole if name.endswith(" kills"))
    return "\n".join(f"{name:24} {passed[name]:4} of {whole[name]:4}" for name in names)


def in_a_fork(share: int, args: argparse.Namespace, home: Path) -> int:
    """`trials` in a process of its own, which writes down its verdicts; returns its pid."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        verdicts = trials(share, args, home)
        (home / f"verdicts-{share}.json").write_text(json.dumps(verdicts))
        code = 0
    finally:
        os._exit(code)


def gathered(pids: Sequence[int], home: Path) -> list[Verdict]:
    """The verdicts of all shares, when they have ended."""
    found: list[Verdict] = []
    for share, pid in enumerate(pids):
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"trials {share}, {share + len(pids)}, ... ended early; see {home}")
        rows = json.loads((home / f"verdicts-{share}.json").read_text())
        found += [Verdict(name, tuple(kinds), why) for name, kinds, why in rows]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--only", default="", help="variants of the run whose name holds this")
    args = parser.parse_args()
    if not chosen(args):
        parser.error(f"--only {args.only}: expected part of one of: {', '.join(VARIANTS)}")
    home = Path(tempfile.mkdtemp(prefix="jaxdp-kills-"))
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(home / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    import jaxdp.training  # noqa: F401  for all forks

    began = time.monotonic()
    verdicts = gathered([in_a_fork(i, args, home) for i in range(args.jobs)], home)
    failed = [verdict for verdict in verdicts if verdict.why]
    kills = sum(len(verdict.kinds) for verdict in verdicts)
    print(table(verdicts))
    print(
        f"{len(verdicts) - len(failed)} of {len(verdicts)} ended as the straight run, after "
        f"{kills} kills; seed {args.seed}, {time.monotonic() - began:.0f} s"
    )
    if failed:
        return Exit.FAULT_FOUND
    shutil.rmtree(home)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())

"""Runs that go on in another layout: how far do they leave the run that was not interrupted?

    python tests/training/resume_table.py [--only WORD] [--plot FILE]

Each layout trains its 60 steps.  Copies of that run, cut back to the checkpoint of step 30, go on
in other layouts: `python -m jaxdp.train`, or under the launcher where there are several processes.
From there on the losses of all steps and the last parameters are held against the run that was not
interrupted: the largest relative difference of a loss, and ||difference|| / ||parameters||.

Layouts that are the same training differ by the order of sums alone, so that 1e-5 is the most; the
same layout has to come to the same bits.  Exit code 3 if one does not keep to that.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from jaxdp import checkpoint
from jaxdp.errors import Exit

ROOT = Path(__file__).parent.parent.parent
STEPS, CUT, MOST = 60, 30, 1e-5
COMMON: dict[str, Any] = {
    "steps": STEPS, "global_batch": 48, "model.hidden": "[32]", "model.dropout": 0.1,
    "optimizer.warmup_steps": 10, "log.every": 1, "log.progress": "none", "eval.every": CUT,
    "checkpoint.every": CUT,
}  # fmt: skip


class Layout(NamedTuple):
    """How a run is spread: `devices` in all, equally over `processes`; other keys."""

    name: str
    devices: int
    processes: int = 1
    keys: tuple[tuple[str, Any], ...] = ()


class Row(NamedTuple):
    """A resumed run against the straight one."""

    before: Layout
    after: Layout
    losses: np.ndarray  # [STEPS] relative differences
    params: float


def on(devices: int) -> Layout:
    return Layout(f"{devices} device{'s' * (devices > 1)}", devices)


def zero(devices: int) -> Layout:
    return Layout(f"ZeRO-1, {devices} devices", devices, 1, (("sync.shard_optimizer", True),))


def top_k(devices: int) -> Layout:
    keys = (("sync.compression", "top_k"), ("sync.top_k_fraction", 0.1))
    return Layout(f"top-k, {devices} devices", devices, 1, keys)


TWO = Layout("2 processes", 2, 2)
RING = Layout("ring, 4 devices", 4, 1, (("sync.algorithm", "ring"),))
WIRE = Layout("bfloat16 wire, 4 devices", 4, 1, (("sync.wire", "bfloat16"),))
PAIRS = [
    *((on(4), on(n)) for n in (4, 1, 2, 3, 8)),
    (TWO, on(1)), (on(1), TWO), (TWO, on(4)),
    (zero(4), on(4)), (on(4), zero(4)), (zero(4), zero(2)), (zero(4), on(1)),
    (on(4), RING), (WIRE, on(4)), (top_k(4), top_k(4)), (top_k(4), top_k(2)),
]  # fmt: skip


def is_same_training(row: Row) -> bool:
    """Whether both layouts differ in the order of sums alone, not in what they leave out."""
    return WIRE not in row[:2] and (row.before == row.after or "top-k" not in row.before.name)


def keeps_to_it(row: Row) -> bool:
    """Whether the resumed run is as near to the straight one as it has to be."""
    most = 0.0 if row.before == row.after else MOST if is_same_training(row) else np.inf
    return row.losses.max() <= most and row.params <= most


def train(layout: Layout, out: Path, *, resume: bool) -> None:
    """A run to its end."""
    keys = COMMON | {"devices": layout.devices, "out": out} | dict(layout.keys)
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    words += ["--resume", "true"] if resume else []
    command = [sys.executable, "-m"]
    if layout.processes > 1:
        command += ["jaxdp.launch", "--nproc", str(layout.processes), "-m"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [*command, "jaxdp.train", *words], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if ended.returncode:
        sys.exit(f"{layout.name}: code {ended.returncode}\n{ended.stdout}{ended.stderr}")


def straight(layout: Layout, home: Path) -> Path:
    """The run folder of a layout's uninterrupted run; trained when it is first asked for."""
    out = home / layout.name.replace(" ", "-")
    if not out.exists():
        train(layout, out, resume=False)
    return out


def resumed(before: Layout, after: Layout, home: Path) -> Row:
    """One layout's first half and the other's second, against the first's whole."""
    whole, out = straight(before, home), home / "resumed"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    (out / "summary.json").unlink()
    train(after, out, resume=True)
    one, two = losses(whole), losses(out)
    a, b = (np.concatenate([x.ravel() for x in parameters(run)]) for run in (whole, out))
    shutil.rmtree(out)
    return Row(
        before, after, np.abs(two - one) / one, float(np.linalg.norm(b - a) / np.linalg.norm(a))
    )


def losses(out: Path) -> np.ndarray:
    """[STEPS]: one of each step, whether the run was interrupted or not."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["loss"] for row in rows if "loss" in row}
    if sorted(found) != list(range(1, STEPS + 1)):
        sys.exit(f"{out}: steps {sorted(found)}")
    return np.array([found[step] for step in range(1, STEPS + 1)])


def parameters(out: Path) -> list[np.ndarray]:
    """Of the last checkpoint, in the order of their names."""
    file = out.with_suffix(".safetensors")
    with contextlib.redirect_stdout(io.StringIO()):
        if code := checkpoint.main(["export", str(out), str(file)]):
            sys.exit(code)
    leaves = load_file(file)
    file.unlink()
    return [leaves[name].astype(np.float64) for name in sorted(leaves)]


def draw(rows: list[Row], curves: dict[str, np.ndarray], path: Path) -> None:
    """Losses of the straight runs, and below how far the resumed ones leave them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = np.arange(1, STEPS + 1)
    for name, curve in curves.items():
        above.plot(steps, curve, label=name, linewidth=1)
    for row in rows:
        seen = np.maximum(row.losses[CUT:], 1e-9)
        below.semilogy(
            steps[CUT:], seen, label=f"{row.before.name} → {row.after.name}", linewidth=1
        )
    above.set_ylabel("loss, not interrupted")
    below.set(xlabel="step", ylabel="relative difference of the loss", ylim=(5e-10, 1))
    below.axhline(MOST, color="gray", linestyle=":")
    for axes in (above, below):
        axes.axvline(CUT + 0.5, color="gray", linestyle="--")
        axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="pairs with a layout whose name holds this")
    parser.add_argument("--plot", type=Path, help="a picture of the losses")
    args = parser.parse_args()
    chosen = [pair for pair in PAIRS if args.only in f"{pair[0].name} -> {pair[1].name}"]
    if not chosen:
        parser.error(f"--only {args.only}: no such pair")
    print(f"{'before':26} {'after':26} {'loss':>10} {'parameters':>11}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="jaxdp-resume-") as folder:
        for pair in chosen:
            row = resumed(*pair, Path(folder))
            rows.append(row)
            said = "" if keeps_to_it(row) else "  TOO FAR"
            print(
                f"{row.before.name:26} {row.after.name:26} {row.losses.max():10.1e} "
                f"{row.params:11.1e}{said}",
                flush=True,
            )
        if args.plot:
            befores = dict.fromkeys(before for before, _ in chosen)
            curves = {one.name: losses(straight(one, Path(folder))) for one in befores}
            draw(rows, curves, args.plot)
    return Exit.DONE if all(map(keeps_to_it, rows)) else Exit.FAULT_FOUND


if __name__ == "__main__":
    sys.exit(main())

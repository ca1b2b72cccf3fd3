"""Damages folders of checkpoints at random, and restores: with jaxdp.checkpoints and plain Orbax.

    python tests/checkpoints/mutations.py [--count 1000] [--seed 0]

Three steps are saved by both.  Each trial copies them, does one of `MUTATIONS` to the newest step
(of both, with the same random numbers), and restores the newest that there is.  What comes back is
held, bit for bit, against what was saved under the step number that it carries.

    right       the state of the newest step: what was damaged did not matter
    step back   the state of the newest step that is whole, and a line names each that is not
    raises      nothing came back, and an error said so; for ours a fault: older steps are whole
    silent      another state than was saved, or an older one without a line: always a fault

Exit code 1 where ours has a fault.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxdp.checkpoints import Checkpoints
from jaxdp.errors import StorageError
from jaxdp.state import TrainState

STEPS = (1, 2, 3)
Rng = np.random.Generator


def states(rng: Rng) -> dict[int, TrainState]:
    """A state per step, of several dtypes and sizes."""
    count = jnp.zeros((), jnp.int32)
    return {
        step: TrainState(
            count + step, count, count, count,
            params={
                "w": jnp.asarray(rng.normal(size=(70, 90)), jnp.float32),
                "b": jnp.asarray(rng.normal(size=90), jnp.bfloat16),
                "zeros": jnp.zeros((40, 40)),
            },
            model_state={"mean": jnp.asarray(rng.normal(size=3), jnp.float32)},
            opt_state=(jnp.asarray(rng.integers(0, 99, 5), jnp.int32), ()),
            sync_state=(),
        )
        for step in STEPS
    }  # fmt: skip


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def pick(folder: Path, rng: Rng, smallest: int = 1) -> Path:
    """A random file of at least so many bytes."""
    there = [path for path in files(folder) if path.stat().st_size >= smallest]
    return there[rng.integers(len(there))]


def _rewrite(path: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(path.read_bytes())
    result = change(content)
    path.write_bytes(content if result is None else result)


def flip_a_bit(step: Path, rng: Rng) -> None:
    def change(content: bytearray) -> None:
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))

    _rewrite(pick(step, rng), change)


def flip_a_bit_of_the_largest(step: Path, rng: Rng) -> None:
    def change(content: bytearray) -> None:
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))

    _rewrite(max(files(step), key=lambda path: path.stat().st_size), change)


def overwrite_bytes(step: Path, rng: Rng) -> None:
    def change(content: bytearray) -> None:
        at, count = int(rng.integers(len(content))), int(rng.integers(1, 64))
        content[at : at + count] = rng.bytes(len(content[at : at + count]))

    _rewrite(pick(step, rng), change)


def truncate(step: Path, rng: Rng) -> None:
    _rewrite(pick(step, rng), lambda content: content[: int(rng.integers(len(content)))])


def empty_a_file(step: Path, rng: Rng) -> None:
    pick(step, rng).write_bytes(b"")


def zero_a_page(step: Path, rng: Rng) -> None:
    def change(content: bytearray) -> None:
        at = 4096 * int(rng.integers(-(-len(content) // 4096)))
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))

    _rewrite(pick(step, rng), change)


def append(step: Path, rng: Rng) -> None:
    _rewrite(pick(step, rng), lambda content: content + rng.bytes(int(rng.integers(1, 5000))))


def remove_a_file(step: Path, rng: Rng) -> None:
    pick(step, rng).unlink()


def rename_a_file(step: Path, rng: Rng) -> None:
    path = pick(step, rng)
    path.rename(path.with_name(path.name[::-1] + "x"))


def swap_files(step: Path, rng: Rng) -> None:
    one, other = pick(step, rng), pick(step, rng)
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


def duplicate_over_another(step: Path, rng: Rng) -> None:
    content = pick(step, rng).read_bytes()
    pick(step, rng).write_bytes(content)


def add_a_file(step: Path, rng: Rng) -> None:
    at = pick(step, rng).parent
    (at / rng.choice(["x", "x.pkl", "0.zarray", "_strings.json"])).write_bytes(rng.bytes(99))


def file_of_the_step_before(step: Path, rng: Rng) -> None:
    """A file of this step from the one before: the same name, or the same place in the list."""
    before = step.with_name(str(STEPS[-2]))
    mine, theirs = files(step), files(before)
    place = int(rng.integers(min(len(mine), len(theirs))))
    shutil.copyfile(theirs[place], mine[place])


def data_of_the_step_before(step: Path, rng: Rng) -> None:
    """All but the list of files is that of the step before: an old state under a new manifest."""
    before = step.with_name(str(STEPS[-2]))
    kept = {path.name: path.read_bytes() for path in step.iterdir() if path.is_file()}
    shutil.rmtree(step)
    shutil.copytree(before, step)
    for name, content in kept.items():
        (step / name).write_bytes(content)


def manifests_of_the_step_before(step: Path, rng: Rng) -> None:
    before = step.with_name(str(STEPS[-2]))
    for path in files(step):
        old = before / path.relative_to(step)
        if path.name in ("manifest.json", "_METADATA", "manifest.ocdbt") and old.exists():
            shutil.copyfile(old, path)


def folder_of_the_step_before(step: Path, rng: Rng) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name(str(STEPS[-2])), step)


def swap_folders(step: Path, rng: Rng) -> None:
    before, aside = step.with_name(str(STEPS[-2])), step.with_name("aside")
    step.rename(aside)
    before.rename(step)
    aside.rename(before)


def rename_folder(step: Path, rng: Rng) -> None:
    step.rename(step.with_name(str(int(rng.integers(4, 99)))))


def empty_the_step(step: Path, rng: Rng) -> None:
    shutil.rmtree(step)
    step.mkdir()


def empty_a_folder(step: Path, rng: Rng) -> None:
    folder = pick(step, rng).parent
    shutil.rmtree(folder)
    folder.mkdir()


def a_file_for_the_step(step: Path, rng: Rng) -> None:
    shutil.rmtree(step)
    step.write_bytes(rng.bytes(9))


def a_folder_for_a_file(step: Path, rng: Rng) -> None:
    path = pick(step, rng)
    path.unlink()
    path.mkdir()


def a_link_to_the_step_before(step: Path, rng: Rng) -> None:
    before = step.with_name(str(STEPS[-2]))
    mine, theirs = files(step), files(before)
    place = int(rng.integers(min(len(mine), len(theirs))))
    mine[place].unlink()
    mine[place].symlink_to(theirs[place])


def the_step_is_a_link(step: Path, rng: Rng) -> None:
    shutil.rmtree(step)
    step.symlink_to(step.with_name(str(STEPS[-2])))


def text_for_a_list(step: Path, rng: Rng) -> None:
    """Lists of files and metadata that are no JSON, are huge, or nested deeply."""
    lists = [path for path in files(step) if path.name in ("manifest.json", "_METADATA")]
    texts = [b"", b"{", b"null", b"[]", b'{"step": 3}', b"[" * 10**5, b" " * (1 << 20), b"\xff{}"]
    lists[rng.integers(len(lists))].write_bytes(texts[rng.integers(len(texts))])


def change_a_digit(step: Path, rng: Rng) -> None:
    """A well-formed list that says something else."""
    lists = [path for path in files(step) if path.name in ("manifest.json", "_METADATA")]

    def change(content: bytearray) -> None:
        digits = [i for i, c in enumerate(content) if chr(c).isdigit()]
        content[digits[rng.integers(len(digits))]] = ord(str(rng.integers(10)))

    _rewrite(lists[rng.integers(len(lists))], change)


MUTATIONS = [
    flip_a_bit, flip_a_bit_of_the_largest, overwrite_bytes, truncate, empty_a_file, zero_a_page,
    append, remove_a_file, rename_a_file, swap_files, duplicate_over_another, add_a_file,
    file_of_the_step_before, data_of_the_step_before, manifests_of_the_step_before,
    folder_of_the_step_before, swap_folders, rename_folder, empty_the_step, empty_a_folder,
    a_file_for_the_step, a_folder_for_a_file, a_link_to_the_step_before, the_step_is_a_link,
    text_for_a_list, change_a_digit,
]  # fmt: skip


def same(state: TrainState, saved: TrainState) -> bool:
    """Whether all bits are those that were saved."""
    found, expected = jax.tree.leaves(state), jax.tree.leaves(saved)
    return len(found) == len(expected) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(found, expected, strict=True)
    )


def save_with_ours(folder: Path, saved: dict[int, TrainState]) -> None:
    with Checkpoints(folder) as checkpoints:
        for step, state in saved.items():
            checkpoints.save(step, state, {"note": step})


def save_with_orbax(folder: Path, saved: dict[int, TrainState]) -> None:
    with ocp.CheckpointManager(folder) as manager:
        for step, state in saved.items():
            manager.save(step, args=ocp.args.StandardSave(state._asdict()))
            manager.wait_until_finished()


def judge_ours(folder: Path, saved: dict[int, TrainState], whole: list[int]) -> str:
    """What a restore comes to.  `whole`: steps that are certainly so."""
    with Checkpoints(folder) as checkpoints:
        there = checkpoints.steps()
        try:
            state, meta, lines = checkpoints.restore(saved[1])
        except StorageError as error:
            return "raises" if whole else f"refused, rightly: {error}"
    step = int(state.step)
    if step not in saved or not same(state, saved[step]) or meta != {"note": step}:
        return "silent"
    if step == STEPS[-1]:
        return "right"
    newer = [s for s in there if s > step]
    told = all(any(line.startswith(f"checkpoint {s} is damaged") for line in lines) for s in newer)
    aside = all(os.path.lexists(folder.parent / "damaged" / str(s)) for s in newer)
    return "step back" if told and aside and step >= max(whole, default=0) else "silent"


def judge_orbax(folder: Path, saved: dict[int, TrainState]) -> str:
    try:
        with ocp.CheckpointManager(folder) as manager:
            step = manager.latest_step()
            args = ocp.args.StandardRestore(saved[1]._asdict())
            state = TrainState(**manager.restore(step, args=args))
    except Exception:
        return "raises"
    return "right" if step == STEPS[-1] and same(state, saved[step]) else "silent"


def whole_after(mutation: Callable[..., None]) -> list[int]:
    """Steps that a mutation leaves alone."""
    return list(STEPS[:-2]) if mutation is swap_folders else list(STEPS[:-1])


class Trials:
    """Both kinds of checkpoints, saved once, in a folder of their own."""

    def __init__(self, folder: Path, rng: Rng):
        self.folder, self.saved = folder, states(rng)
        save_with_ours(folder / "ours", self.saved)
        save_with_orbax(folder / "orbax", self.saved)

    def ours(self, mutation: Callable[..., None], seed: int) -> str:
        place = self._copy("ours", mutation, seed)
        return judge_ours(place, self.saved, whole_after(mutation))

    def orbax(self, mutation: Callable[..., None], seed: int) -> str:
        return judge_orbax(self._copy("orbax", mutation, seed), self.saved)

    def _copy(self, which: str, mutation: Callable[..., None], seed: int) -> Path:
        trial = self.folder / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        shutil.copytree(self.folder / which, trial / "checkpoints")
        mutation(trial / "checkpoints" / str(STEPS[-1]), np.random.default_rng(seed))
        return trial / "checkpoints"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # Orbax's readers leave callbacks behind when they fail
    table: dict[str, Counter[str]] = {m.__name__: Counter() for m in MUTATIONS}
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder), rng)
        for trial in range(args.count):
            mutation, seed = MUTATIONS[trial % len(MUTATIONS)], int(rng.integers(2**32))
            ours, orbax = trials.ours(mutation, seed), trials.orbax(mutation, seed)
            table[mutation.__name__].update([f"ours {ours}", f"orbax {orbax}"])
            if ours in ("silent", "raises"):
                print(f"fault: {mutation.__name__} with seed {seed}: {ours}", flush=True)
    return tell(table, args.count)


def tell(table: dict[str, Counter[str]], count: int) -> int:
    columns = [
        *(f"ours {w}" for w in ("right", "step back", "raises", "silent")),
        *(f"orbax {w}" for w in ("right", "raises", "silent")),
    ]
    print(f"{'mutation':30s}" + "".join(f"{name:>16s}" for name in columns))
    for name, row in table.items():
        print(f"{name:30s}" + "".join(f"{row[column]:16d}" for column in columns))
    total = sum(table.values(), Counter())
    print(f"{f'all {count}':30s}" + "".join(f"{total[column]:16d}" for column in columns))
    return int(total["ours silent"] + total["ours raises"] > 0)


if __name__ == "__main__":
    sys.exit(main())

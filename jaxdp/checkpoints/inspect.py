"""Checkpoints for people: which there are, whether they verify, what they hold.  Needs no JAX."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import prod
from pathlib import Path
from typing import Any

from jaxdp.checkpoints import files, manifest
from jaxdp.checkpoints.files import DamageError
from jaxdp.checkpoints.folders import step_folder, steps_in
from jaxdp.checkpoints.manifest import Manifest
from jaxdp.errors import StorageError, UserError
from jaxdp.hlo import format_bytes
from jaxdp.wording import counted

NEWEST = "newest"


@dataclass(frozen=True)
class Finding:
    """What is known of a step.

    Attributes:
      step: its number.
      held: its manifest, where that can be read.
      damage: what is wrong, where something is.
      strangers: files in its folder that it does not hold.
      later: what a later version wrote cannot be judged by this one; in words.
      thoroughly: whether each value was read, and is as it was saved.
    """

    step: int
    held: Manifest | None
    damage: str | None
    strangers: tuple[str, ...] = ()
    later: str | None = None
    thoroughly: bool = False


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints, given that of the run or the folder itself.

    Raises:
      UserError: there is none, or it is empty.
    """
    for folder in (run / "checkpoints", run):
        if steps_in(folder):
            return folder
    if not run.is_dir():
        raise UserError(f"{run}: there is no such folder; expected that of a run")
    raise UserError(f"{run}: no checkpoints there; expected the folder of a run that has saved")


def find_step(folder: Path, step: str) -> int:
    """A step's number from what the user wrote.

    Raises:
      UserError: it is none of those that are there.
    """
    there = steps_in(folder)
    if step == NEWEST:
        return there[-1]
    if not step.isascii() or not step.isdigit() or int(step) not in there:
        words = ", ".join(map(str, there))
        raise UserError(f"{step}: no such step in {folder}; expected {NEWEST}, or one of {words}")
    return int(step)


def look(folder: Path, step: int, digests: bool) -> Finding | None:
    """Holds a step against its manifest, by the sizes of its files or also by their content.

    Returns:
      What was found; None if the step has been deleted meanwhile, as a run that goes on does.
    """
    at, held = step_folder(folder, step), None
    try:
        held = manifest.read(at)
        files.check(at, held.files, digests)
        strangers = manifest.strangers(at, held)
    except DamageError as damage:
        return Finding(step, held, str(damage)) if os.path.lexists(at) else None
    except StorageError as later:
        return Finding(step, None, None, later=str(later))
    return Finding(step, held, None, tuple(strangers))


def manifest_of(folder: Path, step: int) -> Manifest:
    """A step's manifest.

    Raises:
      StorageError: it cannot be read.
    """
    try:
        return manifest.read(step_folder(folder, step))
    except DamageError as damage:
        raise StorageError(f"checkpoint {step} is damaged: {damage}") from damage


def check_sound(folder: Path, held: Manifest) -> None:
    """Raises StorageError if the files of a step are not those that its manifest holds."""
    try:
        files.check(folder, held.files)
    except DamageError as damage:
        raise StorageError(f"checkpoint {held.step} is damaged: {damage}") from damage


def table(found: Iterable[Finding], now: datetime | None = None) -> list[str]:
    """`list`: a line per step, with its size, its age, the devices that saved it, and its state."""
    now = now or datetime.now(UTC)
    lines = [f"{'step':>9}  {'size':>9}  {'age':>9}  {'devices':>7}  state"]
    for one in found:
        facts = one.held.facts if one.held else {}
        size = format_bytes(one.held.bytes) if one.held else "-"
        state = f"damaged: {one.damage}" if one.damage else one.later or "files of the right sizes"
        age, devices = _age(facts.get("saved_at"), now), facts.get("devices", "-")
        lines.append(f"{one.step:>9}  {size:>9}  {age:>9}  {devices:>7}  {state}")
    return lines


def verdict(one: Finding) -> str:
    """`verify`: one step in a line."""
    if one.later:
        return f"step {one.step}: not verified: {one.later}"
    if one.held is None or one.damage:
        return f"step {one.step}: damaged: {one.damage}"
    what = f"{counted(len(one.held.files), 'file')}, {format_bytes(one.held.bytes)}"
    if one.strangers:
        what += f"; added since: {', '.join(one.strangers[:3])}"
        what += f" and {len(one.strangers) - 3} more" * (len(one.strangers) > 3)
    if one.thoroughly:
        what += f"; {counted(len(one.held.leaves), 'leaf')} to the bit"
    return f"step {one.step}: verified, {what}"


def describe(held: Manifest) -> list[str]:
    """`show`: what a manifest says, the leaves apart."""
    facts, run = held.facts, held.run
    versions = ", ".join(f"{name} {v}" for name, v in facts.get("versions", {}).items())
    lines = [f"step {held.step}, {_origin(facts)}"]
    lines.append(f"{counted(len(held.files), 'file')}, {format_bytes(held.bytes)}")
    if versions:
        lines.append(f"with {versions}")
    if slots := facts.get("sync_slots"):
        lines.append(f"sync_state of {counted(slots, 'device')}, each its own")
    if scale := facts.get("loss_scale"):
        lines.append("loss scale " + ", ".join(f"{name} {x:g}" for name, x in scale.items()))
    position, settings = run.get("position", {}), run.get("settings", {})
    if position:
        lines.append(
            f"seed {settings.get('seed')}, {position.get('examples')} examples into the data, "
            f"{position.get('schedule_steps')} steps into the schedule"
        )
    if digest := run.get("settings_digest"):
        lines.append(f"settings {digest[:16]} ({counted(len(settings), 'key')})")
    return lines


def _origin(facts: Mapping[str, Any]) -> str:
    if "adopted_at" in facts:
        return f"taken over from a version before manifests at {facts['adopted_at']}"
    devices, processes = facts.get("devices", 0), facts.get("processes", 0)
    return (
        f"saved at {facts.get('saved_at', 'an unknown time')} on {counted(devices, 'device')} of "
        f"{counted(processes, 'process')}"
    )


def leaf_lines(held: Manifest, norms: dict[str, float] | None = None) -> list[str]:
    """`show`: a line per leaf, with its type, its shape, and its norm where it is known."""
    width = max(map(len, held.leaves), default=0)
    lines = []
    for name, leaf in held.leaves.items():
        norm = "" if norms is None else f"  norm {norms[name]:.6g}"
        lines.append(f"{name:{width}}  {leaf}  {prod(leaf.shape):,} elements{norm}")
    return lines


def _age(saved_at: str | None, now: datetime) -> str:
    try:
        age = now - datetime.fromisoformat(saved_at or "")
    except (ValueError, TypeError):
        return "-"
    for unit, length in (("d", timedelta(days=1)), ("h", timedelta(hours=1))):
        if age >= length:
            return f"{age / length:.1f} {unit}"
    return f"{age / timedelta(minutes=1):.1f} min"

"""What a run shares with the one that it goes on with, and its processes with each other."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxdp import peers
from jaxdp.config import Config, bare, diff, flatten, load_config
from jaxdp.errors import UserError
from jaxdp.report.progress import Reporter
from jaxdp.state import SavedForm
from jaxdp.types import PyTree

# keys that may differ when a run is resumed: they do not change what was learned so far
_MAY_CHANGE = (
    "steps", "devices", "out", "resume", "sync.", "checkpoint.", "eval.", "log.", "guard.",
    "init_from",  # read before step 0 alone
    "data.path", "data.heldout_path",  # files may move: it is their contents that have to stay
)  # fmt: skip
# of these sections, what does change it, or would lose what a compression still owes
_AND_YET_STAY = (
    "sync.local_steps", "sync.outer_", "sync.compression", "sync.power_sgd_rank",
)  # fmt: skip


_CONTENTS = ("sha256", "digest")  # the facts of a data set that tell it from another


def check_same_data(facts: Mapping[str, Any]) -> None:
    """Raises UserError, in every process, if hosts hold different data."""
    found = peers.from_all({name: facts.get(name) for name in _CONTENTS})
    if other := [r for r, contents in enumerate(found) if contents != found[0]]:
        raise UserError(
            f"data: the training data of process {other[0]} are not those of process 0 "
            f"({found[other[0]]} and {found[0]}); expected the same files on every host"
        )


@dataclass(frozen=True)
class Meta:
    """What a checkpoint's manifest holds of the run that saved it.

    Attributes:
      data: facts of the data.
      settings: the keys that a resumed run has to keep, with their values.
      train_seconds: spent in steps so far.
    """

    data: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    train_seconds: float = 0.0

    def at(self, step: int, train_seconds: float) -> dict[str, Any]:
        """As it is kept with `step`: the position in data and schedule is a function of that."""
        batch = self.settings.get("global_batch", 0)
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        position = {"examples": step * batch, "schedule_steps": step}
        return {
            "data": self.data,
            "position": position,
            "settings": self.settings,
            "settings_digest": digest,
            "train_seconds": train_seconds,
        }

    def resumed(self, saved: dict[str, Any]) -> "Meta":
        """This run's, going on from what was saved.

        Raises:
          UserError: the data or a key that has to stay are not the same.
        """
        for name in _CONTENTS:
            old, new = saved.get("data", {}).get(name), self.data.get(name)
            if old != new:
                raise UserError(
                    f"data: {name} is {new} now and was {old} when the run was saved; a resumed "
                    "run needs the same data: put it back, or start a new run with --out"
                )
        mine, settings = json.loads(json.dumps(self.settings)), saved.get("settings", {})
        changed = [key for key in mine if key in settings and mine[key] != settings[key]]
        if changed:  # config.yaml was changed since, else it would have told
            raise UserError(
                *(
                    f"{key}: {bare(mine[key])} now and {bare(settings[key])} in the checkpoint; a "
                    "resumed run keeps it: put config.yaml back, or start a new run with --out"
                    for key in changed
                )
            )
        return replace(self, train_seconds=saved.get("train_seconds", 0.0))


def kept_settings(config: Config) -> dict[str, Any]:
    """The keys that a resumed run has to keep, with their values."""
    return {key: value for key, value in flatten(config).items() if _has_to_stay(key)}


def _has_to_stay(key: str) -> bool:
    return not key.startswith(_MAY_CHANGE) or key.startswith(_AND_YET_STAY)


def told_form(config: Config, form: SavedForm, reporter: Reporter) -> SavedForm:
    """The step's, with a line where what devices keep apart is spread over another number."""
    if (rule := form.respread) is None:
        return form
    what = "residuals" if config.sync.local_steps is None else "inner optimizers"

    def told(saved: PyTree, devices: int) -> PyTree:
        before = len(jax.tree.leaves(saved)[0])
        reporter.line(f"{what} of {before} devices spread over {devices}")
        return rule(saved, devices)

    return form._replace(respread=told)


def check_unchanged(config: Config, out: Path) -> list[str]:
    """A run goes on with what it began with.

    Returns:
      A line for each key that may change and has changed.

    Raises:
      UserError: a key that may not change has changed.
    """
    before = load_config(str(out / "config.yaml"))
    changed = diff(before, config)
    refused = {key: values for key, values in changed.items() if _has_to_stay(key)}
    if refused:
        raise UserError(
            *(
                f"{key}: {bare(new)} now and {bare(old)} in {out / 'config.yaml'}; a resumed "
                "run keeps it: start a new run with --out"
                for key, (old, new) in refused.items()
            )
        )
    return [
        f"resuming with {key} {bare(new)} instead of {bare(old)}"
        for key, (old, new) in changed.items()
        if key not in ("out", "resume")
    ]

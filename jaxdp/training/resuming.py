"""What a run that goes on must have in common with the one that it goes on with."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxdp.config import Config, bare, diff, load_config
from jaxdp.errors import UserError

# keys that may differ when a run is resumed: they do not change what was learned so far
_MAY_CHANGE = (
    "steps", "devices", "out", "resume", "sync.", "checkpoint.", "eval.", "log.", "guard.",
)  # fmt: skip


@dataclass(frozen=True)
class Meta:
    """What a checkpoint holds besides the state: facts of the data, seconds spent in steps."""

    data: dict[str, Any]
    train_seconds: float = 0.0

    def resumed(self, saved: dict[str, Any]) -> "Meta":
        """This run's, going on from what was saved.

        Raises:
          UserError: the data are not the same.
        """
        for name in ("sha256", "digest"):
            old, new = saved.get("data", {}).get(name), self.data.get(name)
            if old != new:
                raise UserError(
                    f"data: {name} is {new} now and was {old} when the run was saved; a resumed "
                    "run needs the same data: put it back, or start a new run with --out"
                )
        return replace(self, train_seconds=saved.get("train_seconds", 0.0))


def check_unchanged(config: Config, out: Path) -> list[str]:
    """A run goes on with what it began with.

    Returns:
      A line for each key that may change and has changed.

    Raises:
      UserError: a key that may not change has changed.
    """
    before = load_config(str(out / "config.yaml"))
    changed = diff(before, config)
    refused = {k: v for k, v in changed.items() if not k.startswith(_MAY_CHANGE)}
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

"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from jaxdp.columns import LOG
from jaxdp.errors import discard_output


class Reporter(Protocol):
    """Where a run's words go."""

    def line(self, text: str) -> None:
        """A line that stays."""
        ...

    def status(self, row: Mapping[str, Any]) -> None:
        """The newest metrics."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


def make_reporter(kind: str, steps: int) -> Reporter:
    """A reporter of `kind` "rich", "plain", "none", or "auto": rich on a terminal."""
    if sys.stdout is None:  # closed by whoever started us
        kind = "none"
    elif kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    return {"rich": RichReporter, "plain": PlainReporter, "none": SilentReporter}[kind](steps)


class SilentReporter:
    """Says nothing."""

    def __init__(self, steps: int = 0): ...

    def line(self, text: str) -> None: ...

    def status(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class PlainReporter:
    """One line after the other, for files and pipes."""

    def __init__(self, steps: int):
        self.steps = steps

    def line(self, text: str) -> None:
        try:
            print(text, flush=True)
        except OSError:  # the reader left (`| head`), or a log's disk is full: the training goes on
            discard_output()

    def status(self, row: Mapping[str, Any]) -> None:
        self.line(f"step {row['step']}/{self.steps}  {describe(row)}")

    def close(self) -> None: ...


class RichReporter:
    """A bar with the newest metrics beneath; lines scroll above it.

    It is drawn when metrics arrive: a refreshing thread would take time from the training.
    """

    def __init__(self, steps: int):
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=40),
            TaskProgressColumn(),
        )
        self._task = self._bar.add_task("", total=steps)
        self._gone = False
        self._live = Live(console=Console(highlight=False), auto_refresh=False, transient=True)

    def line(self, text: str) -> None:
        self._show(lambda: self._live.console.print(text, markup=False, soft_wrap=True))

    def status(self, row: Mapping[str, Any]) -> None:
        def draw() -> None:
            self._live.start()
            self._bar.update(self._task, completed=row["step"])
            self._live.update(Group(self._bar, Text(describe(row))), refresh=True)

        self._show(draw)

    def close(self) -> None:
        self._show(self._live.stop)

    def _show(self, draw: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            draw()
        except (OSError, SystemExit):  # rich raises the latter where a pipe's reader left
            self._gone = True  # the terminal is closed, the disk full: the training goes on
            discard_output()


def describe(row: Mapping[str, Any]) -> str:
    """Metrics in one line: `loss 0.31  accuracy 0.91  lr 1e-3  ...  eta 0:12`."""
    shown = [f"{_SHORT.get(name, name)} {_number(row[name])}" for name in _FIRST if name in row]
    known = {*_FIRST, *_HIDDEN}
    shown += [f"{name} {_number(value)}" for name, value in row.items() if name not in known]
    if "per_second" in row:
        unit = row["unit"]
        shown.append(
            f"{row['per_second']:,.0f} {unit}/s ({row['per_second_per_device']:,.0f}/device)"
        )
    if "data_wait" in row:
        shown.append(f"data wait {row['data_wait']:.0%}")
    if row.get("skipped"):
        shown.append(f"skipped {row['skipped']:.0f}")
    if row.get("nonfinite"):
        shown.append(f"not finite {row['nonfinite']:.0f}")
    if "eta_s" in row:
        shown.append(f"eta {duration(row['eta_s'])}")
    return "  ".join(shown)


_FIRST = ("loss", "accuracy", "bits_per_byte", "learning_rate", "grad_norm")
_SHORT = {"learning_rate": "lr", "grad_norm": "grad norm", "bits_per_byte": "bits/byte"}
_HIDDEN = (*LOG, "weight", "skipped", "nonfinite", "nonfinite_run")


def _number(value: float) -> str:
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"

"""A run as a page, made from the files of its folder alone: it can be made again at any time."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from jaxdp.collectives import algorithms_for, make_schedule, traffic
from jaxdp.config import Config, describe_batch, load_config
from jaxdp.errors import UserError
from jaxdp.report.chart import CHART_ASSETS, Series, bar, line_chart
from jaxdp.report.page import Page, make_page
from jaxdp.report.player import MAX_RANKS, PLAYER_ASSETS, player_html
from jaxdp.report.runfolder import read_json, read_metrics
from jaxdp.report.scale import Unit, write
from jaxdp.report.table import TABLE_ASSETS, Cell, facts, notice, rows_table

# columns of metrics.jsonl that are no metric of the model: the rest gets a chart of its own
_NOT_METRICS = {
    "step", "weight", "skipped", "nonfinite", "nonfinite_run", "learning_rate", "grad_norm",
    "step_time_s", "data_wait", "elapsed_s", "per_second", "per_second_per_device", "unit", "eval",
    "loss",
}  # fmt: skip
_SECONDS = {
    "start": "start-up and data",
    "compiling": "compiling",
    "steps": "steps",
    "input": "waiting for input",
    "evaluation": "evaluation",
    "saving": "checkpoints",
}


@dataclass(frozen=True)
class _Run:
    """What the files of a run folder hold; empty where one is missing."""

    folder: Path
    config: Config | None
    rows: list[dict[str, Any]]
    damaged: int
    summary: dict[str, Any]
    environment: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def devices(self) -> int:
        return self.environment.get("devices", 0)


def run_page(folder: str | Path) -> Page:
    """The report of a run.

    Args:
      folder: of the run, with what there is of config.yaml, metrics.jsonl, summary.json and
        environment.json.

    Raises:
      UserError: there is no such folder, or it holds no run.
    """
    run = _read(Path(folder))
    title = f"{run.folder.resolve().name}: {_what(run)}"
    sections = [
        f"<h1>{escape(title)}</h1>\n",
        *_status(run),
        '<h2>Curves</h2>\n<div class="charts">\n',
        *_curves(run),
        "</div>\n<h2>Where time went</h2>\n",
        _time(run),
        "<h2>What a step communicates</h2>\n",
        *_communication(run),
        "<h2>What ran</h2>\n",
        facts(_ran(run)),
    ]
    assets = (*CHART_ASSETS, *TABLE_ASSETS, *PLAYER_ASSETS)
    return make_page(title, "".join(sections), assets=assets, height=900)


def _read(folder: Path) -> _Run:
    if not (folder / "config.yaml").exists() and not (folder / "metrics.jsonl").exists():
        raise UserError(
            f"{folder}: holds neither config.yaml nor metrics.jsonl; expected the folder of a run"
        )
    try:
        config = load_config(str(folder / "config.yaml"))
    except UserError:
        config = None
    rows, damaged = read_metrics(folder / "metrics.jsonl")
    environment = read_json(folder / "environment.json")
    summary = read_json(folder / "summary.json")
    return _Run(folder, config, rows, damaged, summary, environment, environment.get("run", {}))


def _what(run: _Run) -> str:
    if run.config is None:
        return "a run"
    devices = f" on {run.devices} device{'s' * (run.devices > 1)}" if run.devices else ""
    return f"{run.config.model.kind} on {run.config.data.kind}, {run.config.steps} steps{devices}"


def _status(run: _Run) -> Iterator[str]:
    """How it ended, and what a reader must know before any number."""
    summary = run.summary
    steps = f" of {run.config.steps}" if run.config else ""
    if not summary or (summary["steps"] < run.last_step and "error" not in summary):
        yield notice(
            f"Not ended: the last line of metrics.jsonl is of step {run.last_step}{steps}, and no "
            "summary followed. The run goes on, or was killed."
        )
    elif "error" in summary:
        yield notice(f"FAILED at step {summary['steps']}{steps}: {summary['error']}", alarm=True)
    elif summary["stopped"]:
        yield notice(
            f"Stopped on request at step {summary['steps']}{steps}; the same command with --resume "
            "goes on."
        )
    else:
        yield f"<p>Done at step {summary['steps']}.{escape(_results(summary))}</p>\n"
    skipped = summary.get("skipped", 0)
    if skipped:
        yield notice(f"{skipped} steps were skipped, and changed nothing.", alarm=True)
    if run.environment.get("emulated"):
        yield notice(
            f"{run.devices} emulated devices in one process: shared memory, not a network. Times "
            "say nothing about one."
        )
    if run.config is None:
        yield notice("config.yaml is missing or cannot be read, so parts are left out.")
    if run.damaged:
        yield notice(f"{run.damaged} damaged line(s) of metrics.jsonl were left out.")


def _results(summary: Mapping[str, Any]) -> str:
    means = summary.get("eval", {})
    words = ", ".join(f"{name} {write(x)}" for name, x in means.items() if name != "weight")
    return f" Held out: {words}." if words else ""


def _curves(run: _Run) -> Iterator[str]:
    marks = [(float(step), f"resumed at {step}") for step in run.facts.get("resumed_at", [])]
    held_out = [row | row["eval"] for row in run.rows if isinstance(row.get("eval"), dict)]
    names = ["loss"] + [
        name
        for name in dict.fromkeys(name for row in run.rows + held_out for name in row)
        if name not in _NOT_METRICS
    ]

    def chart(
        title: str, label: str, series: Iterable[Series], unit: Unit = "", log: bool = False
    ) -> str:
        told = [one for one in series if one.x]
        known = [one for one in told if any(y is not None for y in one.y)]
        if not known:
            return f"<p>{escape(title)}: not one finite value.</p>\n" if told else ""
        return line_chart(
            known, title=title, x_label="step", y_label=label, y_unit=unit, log_y=log, marks=marks
        )

    for name in names:
        words = name.replace("_", " ")
        both = [_series("train", run.rows, name), _series("held out", held_out, name)]
        yield chart(words.capitalize(), words, both)
    unit = next((row["unit"] for row in run.rows if "unit" in row), "examples")
    rest: tuple[tuple[str, str, str, Unit, bool], ...] = (
        ("Learning rate", "learning rate", "learning_rate", "", False),
        ("Gradient norm, before clipping", "norm", "grad_norm", "", True),
        ("Throughput", f"{unit} per second", "per_second", "", False),
        ("Waiting for input", "share of the time", "data_wait", "share", False),
    )
    for title, label, name, of, log in rest:
        yield chart(title, label, [_series(label, run.rows, name)], of, log)


def _series(title: str, rows: Iterable[Mapping[str, Any]], name: str) -> Series:
    """A column over steps; null in the file, which was NaN or infinite, is a gap."""
    known = {row["step"]: row[name] for row in rows if name in row}
    values = [y if isinstance(y, int | float) else None for y in known.values()]
    return Series(title, list(known), values)


def _time(run: _Run) -> str:
    seconds = run.summary.get("seconds", {})
    parts = [(words, seconds[name]) for name, words in _SECONDS.items() if name in seconds]
    if not any(value for _, value in parts):
        return "<p>Not known: the run has no summary.</p>\n"
    title = "Since it was resumed" if run.facts.get("resumed_at") else "The whole run"
    return bar(parts, title=title)


def _communication(run: _Run) -> Iterator[str]:
    """What was found in the compiled step, what the algorithm sends, and the algorithm played."""
    if not run.facts:
        yield "<p>Not known: environment.json is missing or older.</p>\n"
        return
    n, algorithm, nbytes = run.devices, run.facts["algorithm"], run.facts["gradient_bytes"]
    found = [
        [
            Cell(one["kind"]),
            Cell(str(one["count"]), one["count"]),
            Cell(write(one["result_bytes"], "bytes"), one["result_bytes"]),
            Cell("in a loop" if one["in_loop"] else "once"),
        ]
        for one in run.facts["collectives"]
    ]
    if found:
        caption = "found in the compiled step; bytes: of the results on one device"
        yield rows_table(("collective", "count", "bytes", "a step"), found, caption=caption)
    else:
        yield "<p>The compiled step holds no collective.</p>\n"
    yield (
        f"<p>{escape(algorithm)}: {write(nbytes, 'bytes')} of gradients over {n} device"
        f"{'s' * (n > 1)}; {escape(run.facts['reason'])}.</p>\n"
    )
    if n < 2:
        return
    if algorithm not in algorithms_for("all_reduce", scheduled=True):
        yield "<p>It is left to the compiler, and so has no schedule to price or to play.</p>\n"
        return
    yield _traffic(algorithm, n, nbytes)
    if n <= MAX_RANKS:
        yield "<p>Replayed on the clock of a model network, whose α and β are yours to move:</p>\n"
        yield player_html(algorithm, n=n, nbytes=nbytes)
    else:
        yield f"<p>Not played: a picture holds at most {MAX_RANKS} ranks.</p>\n"


def _traffic(algorithm: str, n: int, nbytes: int) -> str:
    sent = traffic(make_schedule(algorithm, "all_reduce", n), nbytes)
    least, most = min(sent.sent_bytes), max(sent.sent_bytes)
    each = write(most, "bytes") if least == most else (
        f"{write(least, 'bytes')} to {write(most, 'bytes')}"
    )  # fmt: skip
    return facts(
        [
            ("rounds", str(sent.rounds)),
            ("permutations", str(sent.permutes)),
            ("messages", str(sent.messages)),
            ("a rank sends", each),
            ("a rank combines at most", write(max(sent.reduced_bytes), "bytes")),
        ]
    )


def _ran(run: _Run) -> Iterator[tuple[str, str]]:
    """One line for each thing that the numbers depend on."""
    config, seen, known = run.config, run.environment, run.facts
    if config is not None:
        size = f"; {known['parameters']:,} parameters" if known else ""
        yield "model", f"{_section(config.model)}{size}; compute in {config.compute_dtype}"
        counts = f"; {known['examples']:,} examples, {known['heldout']:,} held out" if known else ""
        yield "data", _section(config.data) + counts
        yield "batch", describe_batch(config, run.devices or 1)
        yield "optimizer", _section(config.optimizer)
        yield "seed", str(config.seed)
    yield "all-reduce", f"{known['algorithm']}; {known['reason']}" if known else ""
    if not seen:
        return
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = [f"{name} {seen[name]}" for name in names if name in seen]
    own = [f"jaxdp {known['jaxdp']}"] if known else []
    yield "versions", ", ".join([*own, f"Python {seen['python']}", *versions])
    emulated = ", emulated" if seen["emulated"] else ""
    yield "devices", f"{seen['devices']} x {seen['device_kind']}{emulated}"
    yield "machine", f"{seen['machine']}, {seen['cpus']} cores, {seen['processes']} process(es)"
    yield "XLA_FLAGS", seen["xla_flags"]
    yield "command", " ".join(seen["command"])


def _section(section: Any) -> str:
    """A section of the configuration: its kind, and what is set in it."""
    values = section.model_dump(exclude_none=True)
    kind = values.pop("kind")
    words = ", ".join(f"{name} {_words(value)}" for name, value in values.items())
    return f"{kind}: {words}" if words else kind


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)

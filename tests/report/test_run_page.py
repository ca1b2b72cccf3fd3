"""The report of a run: made from its folder, whatever became of the run."""

import json
import re

import numpy as np
import pytest

from jaxdp import load_config, run_training
from jaxdp.errors import NumericsError, StorageError, UserError
from jaxdp.report import record
from jaxdp.report.progress import SilentReporter
from jaxdp.report.run_page import run_page
from jaxdp.report.runfolder import read_summary
from jaxdp.report.scale import write


class Lines(SilentReporter):
    """Keeps what it is told."""

    def __init__(self):
        self.lines = []

    def line(self, text):
        self.lines.append(text)


def run(out, *, reporter=None, should_stop=lambda: False, **more):
    given = {
        "out": str(out), "steps": 24, "devices": 4, "model.hidden": (16,), "log.every": 2,
        "eval.every": 6, "checkpoint.every": 8, "sync.algorithm": "ring",
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in more.items()}
    return run_training(load_config(None, list(given.items())), reporter, should_stop)


def stop_after(steps):
    stops = iter([False] * steps + [True])
    return lambda: next(stops)


def text_of(html):
    html = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that ended well."""
    out = tmp_path_factory.mktemp("finished") / "run"
    reporter = Lines()
    run(out, reporter=reporter, microbatches=2)
    assert not any("warning" in line for line in reporter.lines)
    return out


def test_a_run_leaves_its_report_and_it_can_be_made_again(finished, check_html):
    page = run_page(finished)
    assert page.html == (finished / "report.html").read_text(encoding="utf-8")
    assert {"figure", "table", "section"} <= check_html(page.html)
    text = text_of(page.html)
    summary = json.loads((finished / "summary.json").read_text())
    assert f"Done at step 24. Held out: accuracy {write(summary['eval']['accuracy'])}" in text
    assert "4 emulated devices in one process: shared memory, not a network" in text
    assert "96 = 12 examples x 2 microbatches x 4 devices" in text
    parameters = 64 * 16 + 16 + 170
    assert f"{parameters:,} parameters" in text
    assert "rounds 6 permutations 6 messages 24" in text
    assert re.search(r"collective-permute 6 [\d.]+ KiB once", text)
    titles = re.findall(r"<figcaption>([^<]*)</figcaption>", page.html)
    assert titles[:6] == [
        "Loss", "Accuracy", "Learning rate", "Gradient norm, before clipping", "Throughput",
        "Waiting for input",
    ]  # fmt: skip
    assert titles[6].startswith("The whole run: ")
    assert len(page.html) < 2_000_000


def test_the_curves_are_the_metrics(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    loss = re.search(r'<script type="application/json">(.*?)</script>', run_page(finished).html)
    assert loss
    shown = {words: cells for _, words, cells in json.loads(loss[1])}
    assert list(shown) == [str(row["step"]) for row in rows]
    for row in rows:
        train, held_out = shown[str(row["step"])]
        assert train[1] == write(row["loss"])
        assert (held_out is not None) == ("eval" in row)
        assert held_out is None or held_out[1] == write(row["eval"]["loss"])


def test_the_seconds_add_up(finished):
    summary = json.loads((finished / "summary.json").read_text())
    seconds = summary["seconds"]
    assert seconds.keys() == {"start", "compiling", "steps", "input", "evaluation", "saving"}
    assert all(value >= 0 for value in seconds.values())
    assert seconds["steps"] + seconds["input"] == pytest.approx(summary["train_seconds"], abs=2e-3)
    assert seconds["compiling"] == pytest.approx(summary["compile_seconds"], abs=2e-3)
    assert seconds["evaluation"] > 0
    assert seconds["saving"] > 0


def test_a_stopped_run_and_its_continuation(tmp_path):
    run(tmp_path / "a", should_stop=stop_after(13))
    text = text_of((tmp_path / "a" / "report.html").read_text())
    assert "Stopped on request at step 13 of 24; the same command with --resume goes on." in text
    run(tmp_path / "a", resume=True, should_stop=stop_after(5))
    run(tmp_path / "a", resume=True)
    html = (tmp_path / "a" / "report.html").read_text()
    assert "Done at step 24." in text_of(html)
    picture = html[html.index("<svg") : html.index("</svg>")]
    assert re.findall(r"resumed at \d+", picture) == ["resumed at 13", "resumed at 18"]
    steps = re.findall(r'\[[\d.]+,"(\d+)",', html[: html.index("Accuracy</figcaption>")])
    assert len(steps) == len(set(steps))
    assert {"2", "12", "24"} <= set(steps)


def test_what_went_wrong_stands_on_top(tmp_path, check_html):
    with pytest.raises(NumericsError):
        run(tmp_path / "a", optimizer__kind="sgd", optimizer__learning_rate=1e30, log__every=6)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["stopped"]
    html = (tmp_path / "a" / "report.html").read_text()
    check_html(html)
    text = text_of(html)
    assert (
        f"FAILED at step {summary['steps']} of 24: a loss, gradient or model state was not finite"
        in text
    )
    assert "Loss: not one finite value." in text
    assert text.index("FAILED") < text.index("Curves")


def test_a_full_disk_is_one_warning_and_the_run_is_good(tmp_path, monkeypatch):
    def full(path, text):
        raise StorageError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(record, "write_atomically", full)
    reporter = Lines()
    assert run(tmp_path / "a", reporter=reporter)["steps"] == 24
    [warning] = [line for line in reporter.lines if line.startswith("warning")]
    assert "report.html: cannot be written: No space left on device" in warning
    assert not (tmp_path / "a" / "report.html").exists()


def test_a_bug_in_the_page_is_one_warning_too(tmp_path, monkeypatch):
    def broken(folder):
        raise ZeroDivisionError("seven")

    monkeypatch.setattr(record, "run_page", broken)
    reporter = Lines()
    assert not run(tmp_path / "a", reporter=reporter)["stopped"]
    [warning] = [line for line in reporter.lines if line.startswith("warning")]
    assert warning.endswith("report.html: ZeroDivisionError: seven")


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "summary.json", "environment.json"]
)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_files_cost_their_part_only(name, damage, finished, tmp_path, check_html):
    for path in finished.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if damage == "missing":
        (tmp_path / name).unlink()
    else:
        # what is cut off a YAML file may leave another: end it inside of a value
        content = (finished / name).read_bytes()
        end = content.index(b"kind: mlp") + 7 if name == "config.yaml" else -30
        (tmp_path / name).write_bytes(content[:end])
    html = run_page(tmp_path).html
    check_html(html)
    text = text_of(html)
    expected = {
        "config.yaml": "config.yaml is missing or cannot be read",
        "metrics.jsonl": "metrics.jsonl: 1 damaged line." if damage == "cut" else "Curves",
        "summary.json": "Not ended: the last line of metrics.jsonl is of step 24 of 24",
        "environment.json": "environment.json is missing or older",
    }
    assert expected[name] in text
    unread = damage == "cut" and name in ("summary.json", "environment.json")
    assert (f"{name} is damaged, or of another version" in text) == unread


@pytest.mark.parametrize("change", [{"steps": None}, {"stopped": "yes"}, {"eval": 7}])
def test_a_summary_of_another_form_counts_as_damaged(change, finished, tmp_path):
    for path in finished.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    summary = json.loads((finished / "summary.json").read_text())
    assert read_summary(finished) == summary
    (tmp_path / "summary.json").write_text(json.dumps(summary | change))
    assert read_summary(tmp_path) == {}
    assert "summary.json is damaged, or of another version" in text_of(run_page(tmp_path).html)
    del summary[next(iter(change))]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "<h1>" in run_page(tmp_path).html


def test_a_failure_that_is_over_is_history(poison, tmp_path):
    poison(12)
    with pytest.raises(NumericsError):
        run(tmp_path / "a")
    page = tmp_path / "a" / "report.html"
    assert "FAILED at step 12 of 24" in text_of(page.read_text())
    seen = []

    class Watching(Lines):
        def status(self, row):
            seen.append("FAILED" in page.read_text())
            seen.append((page.parent / "summary.json").exists())

    run(tmp_path / "a", resume=True, guard__nonfinite="skip", reporter=Watching())
    assert set(seen) == {False}
    text = text_of(page.read_text())
    assert "FAILED" not in text
    assert "Done at step 24." in text
    assert "Resumed after it had failed at step 12: a loss, gradient or model state" in text
    assert "Loss, gradient or model state not finite: 1 step, which changed nothing." in text
    run(tmp_path / "a", resume=True, steps=26)
    assert text_of(page.read_text()).count("Resumed after it had failed") == 1


def test_what_the_guard_did_is_told(poison, tmp_path):
    poison(11, 12)
    keys = {"guard__nonfinite": "rollback", "guard__limit": 1, "compute_dtype": "float16"}
    summary = run(tmp_path / "a", **keys)
    assert (summary["nonfinite"], summary["left_out"]) == (2, [11, 12])
    text = text_of((tmp_path / "a" / "report.html").read_text())
    assert "Went back from step 11 to the checkpoint of step 8, because of numbers that" in text
    assert "Batches left out: of steps 11 to 12." in text
    assert "not finite: 2 steps, which changed nothing." in text
    overflows = summary["overflows"]
    assert (f"Overflow in float16: {overflows} step" in text) == (overflows > 0)


def test_strange_lines_are_left_out(finished, tmp_path):
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    lines[1:1] = ['{"step": 3, "loss": nul', "[]", '{"step": "four"}', "\x00\x00", "7"]
    lines.append('{"step": 26, "loss": null, "accuracy": "high"}')  # NaN is written as null
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    text = text_of(run_page(tmp_path).html)
    assert "Left out of metrics.jsonl: 5 damaged lines." in text
    assert "the last line of metrics.jsonl is of step 26" in text


def test_a_long_run_is_a_small_page(tmp_path, rng):
    steps = np.arange(10, 300_010, 10)
    names = ("loss", "accuracy", "grad_norm", "learning_rate", "per_second", "data_wait")
    columns = {name: rng.lognormal(size=len(steps)) for name in names}
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for i, step in enumerate(steps):
            values = {name: float(column[i]) for name, column in columns.items()}
            file.write(json.dumps({"step": int(step), "unit": "examples", **values}) + "\n")
    assert len(run_page(tmp_path).html) < 2_000_000


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"sync__algorithm": "psum"}, "It is left to the compiler, and so has no schedule"),
        ({"devices": 1}, "ring: 4.727 KiB of gradients over 1 device;"),
    ],
)
def test_what_cannot_be_played_is_said(options, line, tmp_path):
    run(tmp_path / "a", **options)
    html = (tmp_path / "a" / "report.html").read_text()
    assert '<section class="player" tabindex' not in html
    assert line in text_of(html)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected the folder of a run"):
        run_page(tmp_path)

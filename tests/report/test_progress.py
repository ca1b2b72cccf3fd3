"""What people see while a run goes on."""

import io

import pytest
from rich.console import Console

from jaxdp.report import progress

ROW = {
    "step": 40, "loss": 0.25, "accuracy": 0.9, "learning_rate": 1e-3, "grad_norm": 2.0,
    "weight": 96.0, "skipped": 0.0, "nonfinite": 0.0, "step_time_s": 0.01, "data_wait": 0.02,
    "elapsed_s": 3.0, "per_second": 9600.0, "per_second_per_device": 2400.0, "unit": "examples",
    "eta_s": 75.0,
}  # fmt: skip
WORDS = "loss 0.25  accuracy 0.9  lr 0.001  grad norm 2  9,600 examples/s (2,400/device)"


def test_a_row_in_one_line():
    assert progress.describe(ROW) == f"{WORDS}  data wait 2%  eta 1:15"
    assert "skipped 3" in progress.describe(ROW | {"skipped": 3.0})
    assert "my_metric 7" in progress.describe(ROW | {"my_metric": 7.0})


def test_plain_lines(capsys):
    reporter = progress.make_reporter("plain", 100)
    reporter.line("hello")
    reporter.status(ROW)
    reporter.close()
    assert capsys.readouterr().out.splitlines()[1].startswith(f"step 40/100  {WORDS}")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_cut_off_on_a_terminal(width, monkeypatch):
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=width, highlight=False)
    monkeypatch.setattr(progress, "Console", lambda **options: terminal)
    reporter = progress.make_reporter("rich", 100)
    reporter.status(ROW)
    reporter.line("held out: fine")
    reporter.close()
    shown = file.getvalue()
    assert "step 40/100" in shown
    assert "held out: fine" in shown
    assert all(word in shown for word in ("0.25", "9,600", "2%", "1:15"))


def test_auto_is_plain_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert isinstance(progress.make_reporter("auto", 10), progress.PlainReporter)


def test_durations():
    assert [progress.duration(s) for s in (0, 59.6, 75, 3661)] == [
        "0:00",
        "1:00",
        "1:15",
        "1:01:01",
    ]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), BrokenPipeError()])
def test_a_terminal_that_is_gone_does_not_end_the_training(error, monkeypatch, tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise error

    terminal = Console(file=Gone(), force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", lambda **options: terminal)
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        reporter = progress.make_reporter("rich", 100)
        reporter.status(ROW)
        reporter.line("held out: fine")
        reporter.status(ROW)
        reporter.close()

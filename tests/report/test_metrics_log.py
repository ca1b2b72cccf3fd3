"""metrics.jsonl: whole lines only, and no reason to end a training."""

import json
import os

from jaxdp.errors import StorageError
from jaxdp.report import runfolder, runlog
from jaxdp.report.progress import PlainReporter
from jaxdp.report.runfolder import MetricsLog


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_half_a_row_is_taken_back(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.write({"step": 1}) is None
    write = os.write
    monkeypatch.setattr(runfolder.os, "write", lambda handle, data: write(handle, data[:5]))
    warning = log.write({"step": 2})
    monkeypatch.undo()
    assert warning is not None
    assert "No space left on device" in warning
    assert log.write({"step": 3}) is None
    assert steps(log.path) == [1, 3]


def test_lines_that_all_stay_are_not_written_again(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1})
    before = log.path.stat().st_ino
    log.drop_after(1)
    assert log.path.stat().st_ino == before
    log.drop_after(0)
    assert steps(log.path) == []


def test_going_back_on_a_full_disk_is_a_warning(tmp_path, monkeypatch, capsys):
    log = runlog.RunLog(
        tmp_path, PlainReporter(9), steps=9, devices=1, items_per_step=1, unit="examples"
    )

    def full(path, text):
        raise StorageError(f"{path}: cannot be written: No space left on device")

    log.metrics(1, {"loss": 1.0, "step_time_s": 0.5, "elapsed_s": 1.0})
    monkeypatch.setattr(runfolder, "write_atomically", full)
    log.back_to(0)
    assert "No space left on device; training goes on" in capsys.readouterr().out

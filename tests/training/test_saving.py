"""Saves of a run: room, other tries, other runs, how often; and what a run begins with."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from jaxdp import checkpoint, load_config, run_training
from jaxdp.checkpoints import folders, space
from jaxdp.config import Config
from jaxdp.errors import StorageError, UserError
from jaxdp.report.progress import SilentReporter
from jaxdp.runtime.lease import NAME
from jaxdp.training import holding, saving
from jaxdp.training.saving import Interval, SaveEvery, Saver, first_interval

HERE = Path(__file__).parent


class Lines(SilentReporter):
    """Keeps what it is told."""

    def __init__(self):
        self.lines = []

    def line(self, text):
        self.lines.append(text)


def run(out, reporter=None, should_stop=lambda: False, **more):
    given = {
        "out": str(out), "steps": 8, "devices": 2, "model.hidden": (8,), "log.every": 2,
        "global_batch": 32, "optimizer.kind": "sgd",
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in more.items()}
    return run_training(load_config(None, list(given.items())), reporter, should_stop)


class Disk:
    """Checkpoints that fail a few times: when a save starts, or behind its back."""

    def __init__(self, folder, starting=0, behind=0):
        self.folder, self.starting, self.behind = folder, starting, behind
        self.saved, self.failure = [], None

    def steps(self):
        return self.saved

    def wait(self):
        if failure := self.failure:
            self.failure = None
            raise failure

    def save(self, step, state, meta):
        self.wait()
        if self.starting:
            self.starting -= 1
            raise StorageError("starting")
        if self.behind:
            self.behind -= 1
            self.failure = StorageError("behind")
            return
        self.saved.append(step)


@pytest.fixture
def at_once(monkeypatch):
    """Other tries without a pause."""
    monkeypatch.setattr(saving, "_DELAYS_S", (0.0, 0.0))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fault", ["starting", "behind"])
@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_a_save_that_fails_is_tried_again_some_times(fault, times, whole, at_once, tmp_path):
    disk, told = Disk(tmp_path, **{fault: times}), []
    saver = Saver(disk, None, 10, told.append)
    # behind our back, and not waited for, nothing has failed yet
    unseen = fault == "behind" and not whole and times > 0
    if times == 3 and not unseen:
        with pytest.raises(StorageError, match=fault):
            saver.save(5, None, {}, whole=whole)
        assert len(told) == 2
        return
    assert saver.save(5, None, {}, whole=whole) == (not times or unseen)
    assert (disk.saved == [5]) == (not unseen)
    assert told == [f"warning: {fault}; trying again in 0 s"] * (0 if unseen else times)
    if unseen:  # then at once, whatever the interval
        assert SaveEvery(saver, 100, saver.save).due(6, 1000)
        if times == 3:
            with pytest.raises(StorageError, match=fault):
                saver.save(6, None, {}, whole=False)
        else:
            assert not saver.save(6, None, {}, whole=False)
            assert disk.saved == [6]
    assert not SaveEvery(saver, 100, saver.save).due(7, 1000)


def test_of_several_processes_one_that_failed_says_so_at_once(tmp_path, monkeypatch, capsys):
    """They try again together, at the next save."""
    disk = Disk(tmp_path, behind=2)
    saver = Saver(disk, None, 10, pytest.fail)
    every = SaveEvery(saver, 4, saver.save)
    monkeypatch.setattr(saving.peers, "joined", lambda: 2)
    for _ in range(2):  # each failure once
        disk.failure = None
        disk.save(4, None, {})
        assert not every.due(5, 9)
        told = capsys.readouterr().err
        assert told == "warning: behind; all processes try again at the next save\n"
        assert not every.due(6, 9)
        assert every.due(8, 9)
        assert capsys.readouterr().err == ""


def test_no_save_without_the_lock_or_without_room(at_once, tmp_path, monkeypatch):
    class Lost:
        def check(self):
            raise StorageError("lost")

    disk, told = Disk(tmp_path), []
    with pytest.raises(StorageError, match="lost"):
        Saver(disk, Lost(), 10, told.append).save(5, None, {}, whole=True)
    assert told == []  # it does not come back
    with pytest.raises(StorageError, match=r"1 checkpoint of .* needs .*, and .* are free"):
        Saver(disk, None, 2**60, told.append).save(5, None, {}, whole=True)
    assert disk.saved == []


def test_intervals():
    config = load_config(None, [("checkpoint.every", "auto"), ("checkpoint.keep_best", "loss"),
                                ("eval.every", 7)])  # fmt: skip
    assert first_interval(config) == 14
    assert first_interval(Config()) == 0
    told = []
    interval = Interval(config, told.append)
    assert interval.measured(99.0, 99.0, 0.1) is None  # the first one compiles
    assert interval.measured(0.5, 0.6, 0.0) is None  # no row yet
    assert interval.measuring
    assert interval.measured(0.5, 0.6, 0.1) == 2940
    assert not interval.measuring
    assert told == [
        "saving every 2940 steps, 4:54: a save stops the training for 0.500 s and is on disk after "
        "0.600 s"
    ]


def test_auto_keeps_the_bits(tmp_path):
    reporter = Lines()
    straight = run(tmp_path / "a", steps=24)
    auto = {"checkpoint__every": "auto", "checkpoint__mean_time_to_failure": 1e-9}
    again = run(tmp_path / "b", reporter, steps=24, **auto)
    assert again["params_digest"] == straight["params_digest"]
    assert sum(line.startswith("saving every") for line in reporter.lines) == 1
    # failing all the time, it saves as often as the disk can take
    assert sorted(os.listdir(tmp_path / "b" / "checkpoints"))[-1] == "24"


@pytest.mark.parametrize("every", [2, "auto"])
def test_a_save_that_fails_once_is_made_up_for(tmp_path, monkeypatch, every):
    """Also where the run is stopped right after it, and where its cost was to be measured."""
    monkeypatch.setattr(saving, "_FIRST_AUTO", 2)
    real, failures, reporter = folders.publish, [4], Lines()

    def publish(folder, step):
        if step in failures:
            failures.remove(step)
            raise OSError(28, "No space left on device")
        real(folder, step)

    monkeypatch.setattr(folders, "publish", publish)
    asked = []

    def stop():
        asked.append(1)
        return len(asked) == 5  # before step 5

    summary = run(tmp_path / "a", reporter, stop, checkpoint__every=every)
    assert (summary["stopped"], summary["steps"], failures) == (True, 4, [])
    assert "4" in os.listdir(tmp_path / "a" / "checkpoints")
    told = [line for line in reporter.lines if "trying again" in line]
    assert len(told) == 1
    assert "No space left on device" in told[0]


def test_killed_before_its_report_a_complete_run_gets_it(tmp_path):
    run(tmp_path / "a", steps=1)
    report = tmp_path / "a" / "report.html"
    written = report.read_text()
    report.rename(report.with_name("report.html.partial"))
    reporter = Lines()
    run(tmp_path / "a", reporter, steps=1, resume="auto")
    assert reporter.lines[-1].startswith("nothing to do: ")
    assert report.read_text() == written
    assert not list(tmp_path.rglob("*.partial"))


def test_files_of_another_program_are_not_overwritten(tmp_path):
    for name in ("metrics.jsonl", "summary.json"):
        out = tmp_path / name.replace(".", "-")
        out.mkdir()
        (out / name).write_text('{"step": 3}\n')
        with pytest.raises(UserError, match=f"holds {name} and no config.yaml: another program's"):
            run(out, resume="auto")
        assert os.listdir(out) == [name]
    (tmp_path / "a" / "checkpoints" / "007").mkdir(parents=True)  # no step of ours
    run(tmp_path / "a", resume="auto", steps=1)
    with pytest.raises(UserError, match="cannot be used: File name too long"):
        run(tmp_path / ("n" * 300))


def test_who_is_refused_the_lock_removes_nothing(tmp_path, monkeypatch):
    def refused(path, tell):
        raise UserError("held")

    monkeypatch.setattr(holding, "Lease", refused)
    with pytest.raises(UserError, match="held"):
        run(tmp_path / "a")
    assert (tmp_path / "a" / "checkpoints").is_dir()


def test_c9_the_best_is_kept_by_the_held_out_metric(tmp_path):
    """Trained to get worse: the first save is the best and stays."""
    keys = {
        "optimizer__learning_rate": 30.0, "eval__every": 2, "checkpoint__every": 2,
        "checkpoint__keep": 2, "checkpoint__keep_best": "loss", "checkpoint__keep_every": 4,
        "steps": 16,
    }  # fmt: skip
    run(tmp_path / "a", **keys)
    rows = map(json.loads, (tmp_path / "a" / "metrics.jsonl").read_text().splitlines())
    losses = {row["step"]: row["eval"]["loss"] for row in rows if "eval" in row}
    best = min(losses, key=lambda step: (losses[step], -step))
    expected = {best, 4, 8, 12, 14, 16}
    assert set(map(int, os.listdir(tmp_path / "a" / "checkpoints"))) == expected
    held = json.loads((tmp_path / "a" / "checkpoints" / "8" / "manifest.json").read_text())
    assert held["run"]["evaluation"]["loss"] == losses[8]
    assert math.isfinite(losses[8])


def test_c6_no_room_is_told_before_step_0_and_leaves_no_folder(tmp_path, monkeypatch):
    usage = space.shutil.disk_usage(tmp_path)._replace(free=400_000)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda folder: usage)
    keys = {"checkpoint__every": 1, "checkpoint__keep": 5}
    with pytest.raises(StorageError, match=r"6 checkpoints of .* need 408.* kB, and 400.0 kB"):
        run(tmp_path / "new" / "a", **keys)
    assert list(tmp_path.iterdir()) == []
    run(tmp_path / "a", **keys | {"checkpoint__keep": 4, "steps": 2})


def test_c12_n2_a_folder_in_use_is_refused(tmp_path):
    second = []

    def start_another():
        for resume in (False, True, "auto"):
            with pytest.raises(UserError) as refused:
                run(tmp_path / "a", resume=resume)
            second.append(str(refused.value))
        return False

    run(tmp_path / "a", should_stop=start_another, steps=1)
    assert set(second) == {
        f"out: {tmp_path / 'a'} is in use by a run of this very process; wait for it or end it, or "
        "choose another folder with --out"
    }
    assert not (tmp_path / "a" / NAME).exists()
    run(tmp_path / "a", resume=True, steps=2)


def test_a_run_whose_lock_was_taken_writes_nothing_more(tmp_path):
    def take():
        (tmp_path / "a" / NAME).unlink(missing_ok=True)
        return False

    with pytest.raises(StorageError, match="was removed; two runs must not write"):
        run(tmp_path / "a", should_stop=take)
    assert not (tmp_path / "a" / "summary.json").exists()
    assert os.listdir(tmp_path / "a" / "checkpoints") == []


def test_checkpoints_behind_a_symbolic_link_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoints").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="is a symbolic link, and nothing is deleted through one"):
        run(tmp_path / "a")


def test_exported_and_begun_with(tmp_path, capsys):
    file = tmp_path / "p.safetensors"
    first = run(tmp_path / "a", checkpoint__every=4)
    command = ["export", str(tmp_path / "a"), str(file)]
    assert checkpoint.main(command) == 0
    assert capsys.readouterr().out == f"step 8: 4 arrays in {file}\n"
    assert checkpoint.main(command) == 2
    assert "is there already" in capsys.readouterr().err
    assert checkpoint.main([*command[:2], str(tmp_path / "q"), "--step", "4"]) == 0
    four, eight = load_file(tmp_path / "q"), load_file(file)
    assert (
        four.keys()
        == eight.keys()
        == {
            f"params/{layer}/{kind}"
            for layer in ("hidden/00", "logits")
            for kind in ("kernel", "bias")
        }
    )
    assert any((four[name] != eight[name]).any() for name in four)

    reporter = Lines()
    keys = {"init_from": str(file), "steps": 1, "optimizer__learning_rate": 1e-30}
    begun = run(tmp_path / "b", reporter, **keys)
    assert f"init   parameters from {file}" in reporter.lines
    assert begun["params_digest"] == first["params_digest"]
    file.unlink()  # a run that goes on does not need it
    run(tmp_path / "b", **keys | {"steps": 2, "resume": True})
    with pytest.raises(UserError, match="no such file"):
        run(tmp_path / "c", **keys)
    with pytest.raises(UserError, match=r"kernel is float32\[64, 8\] there and .*64, 9\]"):
        run(tmp_path / "c", **keys | {"init_from": str(tmp_path / "q"), "model__hidden": (9,)})
    assert not (tmp_path / "c").exists()


def test_c6_a_disk_that_fills_up_and_is_freed():
    """A few trials of the command; it needs the right to mount."""
    if os.geteuid():
        pytest.skip("not root: no small disk can be mounted")
    command = HERE.parent / "checkpoints" / "full_disk.py"
    ended = subprocess.run(
        [sys.executable, str(command), "--count", "10"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parent.parent)}, check=False, timeout=300,
    )  # fmt: skip
    if ended.stderr == "no right to mount a small disk\n":
        pytest.skip(ended.stderr)
    assert (ended.returncode, ended.stderr) == (0, "")

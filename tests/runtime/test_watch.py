"""Heartbeats tell the phase that a run is in; stacks come when they are asked for."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import optax
import pytest

from jaxdp import all_reduce_sync, fit, load_config, make_train_step, run_training
from jaxdp.checkpoints import Checkpoints
from jaxdp.errors import UserError
from jaxdp.loop import Every
from jaxdp.runtime import control
from jaxdp.runtime.faults import PlannedError
from jaxdp.runtime.watch import Watch, watching

ROOT = Path(__file__).parent.parent.parent


class Diary(Watch):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.entries, self.beats, self.inputs = [], [], []

    def enter(self, phase, step):
        self.entries.append((phase, step))

    def beat(self):
        self.beats.append(self.entries[-1])

    def making_input(self, step):
        self.inputs.append(step)


class Batches:
    def batch(self, step):
        return {"g": np.full(4, step, np.float32)}


@pytest.fixture
def step(mesh_of):
    def loss(params, model_state, batch, keys):
        return (params["w"] * batch["g"]).sum(), np.float32(4)

    return make_train_step(loss, optax.sgd(1.0), all_reduce_sync(), mesh_of(2))


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(control.CONTROL, raising=False)
    monkeypatch.delenv("JAXDP_FAULTS", raising=False)
    with watching(0, tmp_path) as watch:
        watch.enter("step", 1)
        watch.beat()
        watch.making_input(1)
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_says_where_the_rank_is_and_grows(tmp_path, monkeypatch):
    monkeypatch.setenv(control.CONTROL, str(tmp_path))
    with watching(2, tmp_path / "run") as watch:
        seen = []
        for phase, number in (("start", 0), ("step", 7), ("step", 8)):
            before = time.monotonic()
            watch.enter(phase, number)
            beat = control.read_heartbeat(tmp_path, 2)
            assert (beat.rank, beat.pid, beat.phase, beat.step) == (2, os.getpid(), phase, number)
            assert before - 1e-5 <= beat.since <= time.monotonic() + 1e-5
            seen.append(beat.beat)
        watch.beat()
        beat = control.read_heartbeat(tmp_path, 2)
        assert (beat.phase, beat.step, [*seen, beat.beat]) == ("step", 8, [1, 2, 3, 4])
    assert control.heartbeat_file(tmp_path, 2).stat().st_size == control.RECORD_BYTES


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_does_not_end_a_training():
    with open("/dev/full", "wb") as full:
        Watch(0, full.fileno()).enter("step", 1)


def test_the_stacks_of_all_threads_come_at_sigusr1(tmp_path, monkeypatch):
    monkeypatch.setenv(control.CONTROL, str(tmp_path))
    over = threading.Event()

    def stuck_in_its_data():
        over.wait()

    thread = threading.Thread(target=stuck_in_its_data)
    with watching(1, tmp_path) as watch:
        watch.enter("step", 3)
        thread.start()
        try:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            over.set()
            thread.join()
        text = control.stacks_file(tmp_path, 1).read_text()
    assert text.count("in stuck_in_its_data") == 2
    assert text.count("in test_the_stacks_of_all_threads") >= 2
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (control.CONTROL, "/no/such", "JAXDP_CONTROL: no folder /no/such"),
        ("JAXDP_FAULTS", "boom", "JAXDP_FAULTS: 'boom'"),
    ],
)
def test_an_environment_that_cannot_be_meant_is_one_line(name, value, said, tmp_path, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said), watching(0, tmp_path):
        pass
    ended = subprocess.run(
        [sys.executable, "-m", "jaxdp.train", "--out", tmp_path / "run"],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert said in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_step_begins_by_waiting_for_its_input(step):
    diary = Diary()
    fit(
        step, step.init({"w": np.float32(0)}), Batches(), 6, watch=diary,
        evaluate=Every(4, lambda t, state: {}), save=Every(3, lambda t, state: None),
    )  # fmt: skip
    steps = [("step", t) for t in range(1, 7)]
    assert diary.entries == [
        ("compile", 0), *steps[:3], ("save", 3), steps[3], ("evaluation", 4), *steps[4:],
        ("evaluation", 6), ("save", 6),
    ]  # fmt: skip
    assert diary.inputs == [1, 2, 3, 4, 5, 6]


def test_a_run_is_watched_to_its_end(tmp_path, monkeypatch):
    diary, waited_in = Diary(), []
    real = Checkpoints.wait
    monkeypatch.setattr(
        Checkpoints, "wait", lambda self: waited_in.append(diary.entries[-1]) or real(self)
    )
    given = {
        "out": str(tmp_path / "run"), "steps": 6, "devices": 2, "model.hidden": (8,),
        "eval.every": 3, "eval.batch": 96, "checkpoint.every": 4, "log.every": 3,
    }  # fmt: skip
    run_training(load_config(None, list(given.items())), watch=diary)
    phases = [phase for phase, _ in diary.entries]
    assert phases == [
        "compile", "step", "step", "step", "evaluation", "step", "save", "step", "step",
        "evaluation", "save", "end",
    ]  # fmt: skip
    # for what is saved in the background: under the deadline of a save, before each and at the end
    assert waited_in == [("save", 4), ("save", 6), ("save", 6)]
    # 360 held out, in batches of 96
    assert diary.beats == [("evaluation", 3)] * 4 + [("evaluation", 6)] * 4


def test_a_fault_in_the_input_comes_to_the_loop(step, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDP_FAULTS", "0:3:input:raise")
    with watching(0, tmp_path) as watch, pytest.raises(PlannedError, match="phase input"):
        fit(step, step.init({"w": np.float32(0)}), Batches(), 10, watch=watch)
    with watching(0, tmp_path) as watch:
        assert fit(step, step.init({"w": np.float32(0)}), Batches(), 10, watch=watch).step == 10

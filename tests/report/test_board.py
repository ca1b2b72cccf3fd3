"""TensorBoard shows each step once, whatever the run went back to."""

import sys
import types

import pytest

from jaxdp.report.progress import PlainReporter, SilentReporter
from jaxdp.report.runlog import RunLog


class Files:
    """What tensorboardX would write: per file its first step to purge, its suffix, its scalars."""

    def __init__(self):
        self.opened = []

    def writer(self, folder, max_queue, purge_step, filename_suffix):
        assert max_queue > 1000
        self.alive = True
        thread = types.SimpleNamespace(is_alive=lambda: self.alive)
        one = types.SimpleNamespace(purge=purge_step, suffix=filename_suffix, scalars=[], open=True)
        one.add_scalar = lambda name, value, step: one.scalars.append((name, value, step))
        one.close = lambda: setattr(one, "open", False)
        one.file_writer = types.SimpleNamespace(event_writer=types.SimpleNamespace(_worker=thread))
        self.opened.append(one)
        return one

    def shown(self, name):
        """The steps and values that TensorBoard shows: a file purges what older ones hold."""
        found = {}
        for one in self.opened:
            found = {step: value for step, value in found.items() if step < one.purge}
            new = [(step, value) for n, value, step in one.scalars if n == name]
            assert not found.keys() & dict(new).keys()
            found |= dict(new)
        return found


@pytest.fixture
def files(monkeypatch):
    """Stands in for the extra, which need not be installed."""
    files = Files()
    module = types.SimpleNamespace(SummaryWriter=files.writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    return files


def open_log(out, resumed_step=0):
    return RunLog(
        out, SilentReporter(), steps=9, devices=2, items_per_step=4, unit="examples",
        resumed_step=resumed_step, tensorboard=True,
    )  # fmt: skip


def train(log, steps, loss):
    for step in steps:
        log.metrics(step, {"loss": loss, "step_time_s": 0.5, "elapsed_s": step})


def test_steps_that_are_done_again_replace_those_before(files, tmp_path):
    log = open_log(tmp_path)
    train(log, range(1, 7), 1.0)
    log.evaluation(6, {"loss": 5.0, "weight": 7.0})
    log.back_to(4)
    train(log, range(5, 8), 2.0)
    log.close()
    log = open_log(tmp_path, resumed_step=5)  # killed, and saved at 5
    train(log, range(6, 9), 3.0)
    log.close()
    expected = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 3.0, 7: 3.0, 8: 3.0}
    assert files.shown("loss") == expected
    assert files.shown("eval/loss") == {}
    assert not any(one.open for one in files.opened)
    # two files of one process in one second need two names
    assert files.opened[0].suffix != files.opened[1].suffix


def test_a_full_disk_ends_the_files_and_not_the_training(files, tmp_path, capsys):
    log = open_log(tmp_path)
    log._reporter = PlainReporter(9)
    train(log, range(1, 3), 1.0)
    files.alive = False  # as its thread is, of an OSError
    train(log, range(3, 6), 1.0)
    log.close()
    assert capsys.readouterr().out.count("cannot be written; training goes on without") == 1
    assert files.shown("loss").keys() == {1}
    assert files.opened[0].open  # closing would wait for that thread
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5

"""Whole runs from a configuration: the run folder, stopping and resuming, N devices."""

import importlib.util
import json
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxdp.training
from jaxdp import assemble, columns, load_config, run_training, train
from jaxdp.errors import UserError
from jaxdp.report.progress import SilentReporter

ROOT = Path(__file__).parent.parent
TIMES = ("step_time_s", "data_wait", "elapsed_s", "per_second", "per_second_per_device")


class Lines(SilentReporter):
    """Keeps what it is told."""

    def __init__(self):
        self.lines, self.rows = [], []

    def line(self, text):
        self.lines.append(text)

    def status(self, row):
        self.rows.append(dict(row))


def run(out, *overrides, should_stop=lambda: False, reporter=None, **more):
    given = {
        "out": str(out), "steps": 24, "devices": 4, "model.hidden": (32,), "model.dropout": 0.2,
        "log.every": 5, "eval.every": 12, "checkpoint.every": 8,
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in more.items()}
    return run_training(load_config(None, list(given.items())), reporter, should_stop)


def rows_of(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if name not in TIMES} for row in rows]


def test_the_run_folder(tmp_path):
    reporter = Lines()
    summary = run(tmp_path / "a", reporter=reporter)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "report.html",
        "summary.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == summary
    assert (summary["steps"], summary["devices"], summary["stopped"]) == (24, 4, False)
    assert (summary["algorithm"], summary["parameters"]) == ("psum", 64 * 32 + 32 + 330)
    assert summary["eval"]["weight"] == 360
    assert len(summary["params_digest"]) == 64
    rows = rows_of(tmp_path / "a")
    assert [row["step"] for row in rows] == [5, 10, 12, 15, 20, 24]
    assert [row["step"] for row in rows if "eval" in row] == [12, 24]
    assert {"loss", "accuracy", "learning_rate", "grad_norm"} <= rows[0].keys()
    # a metric of the loss's own that is called like another column would replace it
    told = {name for row in [*rows, *reporter.rows] for name in row} | set(TIMES)
    elsewhere = {"loss_scale", "overflows", "inner_grad_norm"}  # of float16, and of local SGD
    assert told == {*columns.STEP, *columns.LOG, "accuracy"} - elsewhere
    assert any("4 emulated devices in one process" in line for line in reporter.lines)
    assert any("a step runs 1 all-reduce" in line for line in reporter.lines)
    assert any("1 bucket planned, 1 all-reduce, " in line for line in reporter.lines)
    assert {"per_second", "eta_s", "data_wait"} <= reporter.rows[-1].keys()
    environment = json.loads((tmp_path / "a" / "environment.json").read_text())
    assert environment["jax"] == jax.__version__
    assert environment["emulated"]


@pytest.mark.parametrize(("launched", "every"), [(True, 0), (True, 2), (False, 0)])
def test_a_launcher_can_restart_from_what_is_saved_alone(launched, every, tmp_path, monkeypatch):
    if launched:
        monkeypatch.setenv("JAXDP_CONTROL", str(tmp_path))
    reporter = Lines()
    run(tmp_path / "a", reporter=reporter, steps=2, eval__every=0, checkpoint__every=every)
    told = [line for line in reporter.lines if "checkpoint.every is 0" in line]
    assert len(told) == (launched and not every)


def test_buckets_are_told_and_found(tmp_path):
    reporter = Lines()
    sizes = {"sync__bucket_bytes": 4096, "sync__first_bucket_bytes": 2048}
    first = run(tmp_path / "a", reporter=reporter, microbatches=2, sync__peel_last=True, **sizes)
    assert "peeled the last microbatch is behind the loop, compiled a second time" in reporter.lines
    assert any("in buckets of at most 4.1 kB" in line for line in reporter.lines)
    assert any(line.startswith("sync   3 buckets planned, 3 all-reduces, 9.7 kB found")
               for line in reporter.lines)  # fmt: skip
    assert first["eval"]["loss"] == pytest.approx(run(tmp_path / "b")["eval"]["loss"], rel=1e-4)


def test_f4_the_resolved_config_reproduces_the_run(tmp_path):
    first = run(tmp_path / "a", optimizer__learning_rate=3e-3)
    config = load_config(str(tmp_path / "a" / "config.yaml"), [("out", str(tmp_path / "b"))])
    assert run_training(config)["params_digest"] == first["params_digest"]
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


@pytest.mark.parametrize("stop", [0, 1, 8, 13, 23])
def test_c1_stopped_and_resumed_is_the_straight_run_to_the_bit(stop, tmp_path):
    straight = run(tmp_path / "a", sync__algorithm="ring", microbatches=2)
    stops = iter([False] * stop + [True])
    half = run(
        tmp_path / "b", sync__algorithm="ring", microbatches=2, should_stop=lambda: next(stops)
    )
    assert half["stopped"]
    assert half["steps"] == stop
    again = {"sync__algorithm": "ring", "microbatches": 2, "resume": True}
    assert run(tmp_path / "b", **again, should_stop=lambda: True)["steps"] == stop
    rest = run(tmp_path / "b", **again)
    assert rest["params_digest"] == straight["params_digest"]
    assert rest["eval"] == straight["eval"]
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")  # l3: one row per step


def test_local_steps_resume_to_the_bit(tmp_path):
    local = {"global_batch": 96, "sync__local_steps": 3, "sync__outer_momentum": 0.9}
    reporter = Lines()
    straight = run(tmp_path / "a", **local, reporter=reporter)
    assert "batch  96 = 8 examples x 1 microbatch x 4 devices x 3 local steps" in reporter.lines
    stops = iter([False] * 13 + [True])
    run(tmp_path / "b", **local, should_stop=lambda: next(stops))
    with pytest.raises(UserError, match=r"sync.local_steps: 6 now and 3 in .*; a resumed run"):
        run(tmp_path / "b", **local | {"sync__local_steps": 6}, resume=True)
    rest = run(tmp_path / "b", **local, resume=True)
    assert rest["params_digest"] == straight["params_digest"]


def test_l3_rows_after_the_checkpoint_and_half_lines_are_dropped(tmp_path):
    straight = run(tmp_path / "a")
    stops = iter([False] * 16 + [True])
    run(tmp_path / "b", should_stop=lambda: next(stops))
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:  # what a kill would leave
        file.write('{"step": 20, "loss": 99}\n{"step": 2')
    assert run(tmp_path / "b", resume="auto")["params_digest"] == straight["params_digest"]
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")


def test_c2_the_same_stream_on_another_number_of_devices(tmp_path):
    straight = run(tmp_path / "a")
    stops = iter([False] * 13 + [True])
    run(tmp_path / "b", should_stop=lambda: next(stops))
    reporter = Lines()
    rest = run(tmp_path / "b", resume=True, devices=2, reporter=reporter)
    assert "resuming with devices 2 instead of 4" in reporter.lines
    for a, b in zip(rows_of(tmp_path / "a"), rows_of(tmp_path / "b"), strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-4)
    assert rest["eval"]["loss"] == pytest.approx(straight["eval"]["loss"], rel=1e-4)


def test_a_complete_run_has_nothing_to_do_until_it_is_made_longer(tmp_path):
    first = run(tmp_path / "a")
    reporter = Lines()
    assert run(tmp_path / "a", resume="auto", log__every=3, reporter=reporter) == first
    assert reporter.lines == [f"nothing to do: the run in {tmp_path / 'a'} is complete"]
    longer = run(tmp_path / "a", resume="auto", steps=30)
    assert longer["steps"] == 30
    straight = run(tmp_path / "b", steps=30)
    assert longer["params_digest"] == straight["params_digest"]


def test_what_changed_reads_as_the_user_wrote_it(tmp_path):
    stops = iter([False] * 7 + [True])
    run(tmp_path / "a", should_stop=lambda: next(stops))
    reporter, keys = Lines(), {"sync__bucket_bytes": 4096, "checkpoint__every": 7}
    run(tmp_path / "a", resume=True, reporter=reporter, **keys)
    told = [line for line in reporter.lines if line.startswith("resuming")]
    assert told == [
        "resuming with sync.bucket_bytes 4096 instead of null",
        "resuming with checkpoint.every 7 instead of 8",
    ]


def test_n2_interrupted_twice_in_one_process(tmp_path):
    class Interrupting(Lines):
        def status(self, row):
            if row["step"] >= 10:
                raise KeyboardInterrupt

    def interrupt():
        raise KeyboardInterrupt

    straight = run(tmp_path / "a")
    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", reporter=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", resume=True, should_stop=interrupt)
    assert run(tmp_path / "b", resume=True)["params_digest"] == straight["params_digest"]
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")
    assert set(threading.enumerate()) <= threads


def test_n2_the_program_puts_the_handlers_of_signals_back(tmp_path, monkeypatch, capsys):
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def interrupted(config, reporter, **more):
        assert handlers() != before
        raise KeyboardInterrupt

    before = handlers()
    monkeypatch.setattr(jaxdp.training, "run_training", interrupted)
    for _ in range(2):
        assert train.main(["--out", str(tmp_path / "a")]) == 130
        assert handlers() == before
    assert capsys.readouterr().err == 2 * "interrupted\n"


def test_stopped_and_then_made_shorter_is_complete(tmp_path):
    stops = iter([False] * 7 + [True])
    run(tmp_path / "a", should_stop=lambda: next(stops))
    assert run(tmp_path / "a", resume=True, steps=7) == run(tmp_path / "a", resume=True, steps=7)
    assert not run(tmp_path / "a", resume=True, steps=7)["stopped"]


@pytest.mark.parametrize("damage", ["killed", "damaged"])
def test_c5_killed_before_the_summary_it_is_written_by_the_next_start(damage, tmp_path):
    first = run(tmp_path / "a")
    if damage == "killed":
        (tmp_path / "a" / "summary.json").unlink()
    else:
        (tmp_path / "a" / "summary.json").write_text('{"steps": 24, "stopped": false}')
    again = run(tmp_path / "a", resume="auto")
    assert again["eval"] == first["eval"]
    assert again["params_digest"] == first["params_digest"]


def test_f4_the_config_of_a_resumed_run_starts_a_new_one(tmp_path):
    stops = iter([False] * 7 + [True])
    run(tmp_path / "a", should_stop=lambda: next(stops))
    first = run(tmp_path / "a", resume=True)
    config = load_config(str(tmp_path / "a" / "config.yaml"), [("out", str(tmp_path / "b"))])
    assert run_training(config)["params_digest"] == first["params_digest"]


def test_a_run_that_exists_is_refused_and_left_alone(tmp_path):
    run(tmp_path / "a")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    for options, reason in (
        ({}, "holds a run; go on with it by --resume"),
        ({"resume": True, "seed": 1}, "seed: 1 now and 0 in"),
        ({"resume": True, "model__hidden": (8,)}, r"model.hidden: \[8\] now and \[32\] in"),
    ):
        with pytest.raises(UserError, match=reason):
            run(tmp_path / "a", **options)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}


def test_leftovers_of_a_killed_first_save_are_not_a_checkpoint(tmp_path):
    (tmp_path / "a" / "checkpoints" / "8.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(UserError, match="nothing to resume"):
        run(tmp_path / "a", resume=True)
    assert run(tmp_path / "a", resume="auto")["steps"] == 24
    (tmp_path / "a" / "config.yaml").unlink()
    for resume in (False, True, "auto"):
        with pytest.raises(UserError, match=r"checkpoints and no config\.yaml"):
            run(tmp_path / "a", resume=resume)


def test_other_data_is_noticed_on_resume(tmp_path):
    def write(seed):
        x = np.random.default_rng(seed).normal(size=(300, 4)).astype(np.float32)
        np.savez(tmp_path / "d.npz", inputs=x, label=np.arange(300) % 3)

    options = {"data__kind": "npz", "data__path": str(tmp_path / "d.npz")}
    write(1)
    stops = iter([False] * 9 + [True])
    run(tmp_path / "a", should_stop=lambda: next(stops), **options)
    write(2)
    with pytest.raises(UserError, match="a resumed run needs the same data"):
        run(tmp_path / "a", resume=True, **options)
    write(1)
    assert run(tmp_path / "a", resume=True, **options)["steps"] == 24


@pytest.mark.parametrize("name", ["nothing", "empty", "other"])
def test_resume_from_nothing(name, tmp_path):
    if name != "nothing":
        (tmp_path / name).mkdir()
    if name == "other":
        (tmp_path / name / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="nothing to resume"):
        run(tmp_path / name, resume=True)
    assert run(tmp_path / name, resume="auto")["steps"] == 24


def test_a_mistake_found_late_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="no file train-images"):
        run(tmp_path / "a", data__kind="fashion_mnist", data__path=str(tmp_path))
    with pytest.raises(UserError, match="96 is not divisible"):
        run(tmp_path / "a", devices="auto")  # nine, in these tests
    with pytest.raises(UserError, match="1437 examples"):
        run(tmp_path / "a", global_batch=1440)
    if importlib.util.find_spec("tensorboardX") is None:
        with pytest.raises(UserError, match="pip install tensorboardX"):
            run(tmp_path / "a", log__tensorboard=True)
    assert not (tmp_path / "a").exists()


def test_l4_training_goes_on_without_a_log(tmp_path, monkeypatch):
    from jaxdp.report import runfolder

    really = runfolder.os.open

    def full(path, *args):
        if str(path).endswith("metrics.jsonl"):
            raise OSError(28, "No space left on device")
        return really(path, *args)

    reporter = Lines()
    monkeypatch.setattr(runfolder.os, "open", full)
    summary = run(tmp_path / "a", reporter=reporter, checkpoint__every=0)
    assert summary["steps"] == 24
    warnings = [line for line in reporter.lines if line.startswith("warning")]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]


def test_psum_and_ring_and_any_number_of_devices_train_the_same_model(tmp_path, few):
    """Law 1 through the whole program, for the shipped configuration."""
    losses = {}
    others = [(n, algorithm) for n in (2, 3, 4, 8) for algorithm in ("psum", "ring")]
    for n, algorithm in [(1, "psum"), *few(others, 2)]:
        out = tmp_path / f"{n}{algorithm}"
        config = load_config(
            str(ROOT / "configs" / "digits_mlp.yaml"),
            [("out", str(out)), ("devices", n), ("sync.algorithm", algorithm), ("steps", 21)],
        )
        run_training(config)
        losses[n, algorithm] = [row["loss"] for row in rows_of(out)]
    for key, values in losses.items():
        np.testing.assert_allclose(values, losses[1, "psum"], rtol=1e-4, err_msg=str(key))


def test_a_sharded_run_goes_on_as_a_plain_one_and_back(tmp_path):
    reporter = Lines()
    given = {"sync__shard_optimizer": True, "optimizer__freeze": ("logits/bias",)}
    straight = run(tmp_path / "a", **given)
    stop = iter([False] * 8 + [True])
    run(tmp_path / "b", should_stop=lambda: next(stop), reporter=reporter, **given)
    assert any(line.startswith("zero ") for line in reporter.lines)
    stop = iter([False] * 8 + [True])
    plain = given | {"sync__shard_optimizer": False, "resume": True}
    run(tmp_path / "b", should_stop=lambda: next(stop), **plain)
    again = run(tmp_path / "b", **given, resume=True)
    for name, value in straight["eval"].items():
        assert again["eval"][name] == pytest.approx(value, rel=1e-4)


def test_a_frozen_name_that_is_not_there_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="matches no parameter"):
        run(tmp_path / "a", optimizer__freeze=("hidden/7/*",))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("compression", ["top_k", "power_sgd"])
def test_what_a_compression_owes_is_resumed(compression, tmp_path):
    keys = {"sync__compression": compression, "steps": 12, "checkpoint__every": 0}
    reporter = Lines()
    straight = run(tmp_path / "a", reporter=reporter, **keys)
    names = {"top_k": "1 values, 1 indices", "power_sgd": "1 factors P, 1 factors Q"}[compression]
    assert any(line.startswith(f"sync   1 exact bucket, {names} planned, ")
               and " found in the compiled step" in line for line in reporter.lines)  # fmt: skip
    stops = iter([False] * 5 + [True])
    run(tmp_path / "b", **keys, should_stop=lambda: next(stops))
    with pytest.raises(UserError, match=rf"sync.compression: null now and {compression} in "):
        run(tmp_path / "b", **keys | {"sync__compression": None, "resume": True})
    rest = run(tmp_path / "b", **keys, resume=True)
    assert rest["params_digest"] == straight["params_digest"]
    run(tmp_path / "b", **keys | {"steps": 13, "devices": 2, "resume": True}, reporter=reporter)
    assert "residuals of 4 devices spread over 2" in reporter.lines


def test_data_that_moved_is_told_by_its_contents(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"inputs": rng.random((400, 6), np.float32), "label": rng.integers(0, 3, 400)}
    np.savez(tmp_path / "a.npz", **arrays)
    data = {"data__kind": "npz", "steps": 8}
    run(tmp_path / "run", data__path=str(tmp_path / "a.npz"), **data)
    (tmp_path / "a.npz").rename(tmp_path / "b.npz")
    reporter, moved = Lines(), {"data__path": str(tmp_path / "b.npz"), "resume": True}
    summary = run(tmp_path / "run", reporter=reporter, **data | moved | {"steps": 16})
    assert summary["steps"] == 16
    assert any(line.startswith("resuming with data.path ") for line in reporter.lines)
    arrays["inputs"][0, 0] += 1
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(UserError, match="a resumed run needs the same data"):
        run(tmp_path / "run", **data | moved | {"steps": 24})


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"microbatches": 4}, 24),
        ({"microbatches": 2, "sync__local_steps": 2}, 24),
        ({"eval__batch": 48}, 48),
        ({"eval__batch": 10**9}, 360),
        ({"eval__batch": 7 * 10**8, "devices": 7, "global_batch": 98}, 364),
    ],
)
def test_an_evaluation_holds_what_fits_or_is_there(options, size, tmp_path, monkeypatch):
    sizes, batches = [], assemble.eval_batches

    def noted(source, batch, *rest):
        sizes.append(batch)
        return batches(source, batch, *rest)

    monkeypatch.setattr(assemble, "eval_batches", noted)
    summary = run(tmp_path / "a", steps=2, **options)
    assert summary["eval"]["weight"] == 360
    assert set(sizes) == {size}

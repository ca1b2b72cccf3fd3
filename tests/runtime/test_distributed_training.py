"""Training in several processes is the training of one, to the bit where that is promised."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from jaxdp import load_config, run_training
from jaxdp.data import Loader, load_dataset

WORKER = Path(__file__).parent / "training_worker.py"
BASE = {
    "model.hidden": [16], "steps": 8, "global_batch": 48, "optimizer.warmup_steps": 0,
    "optimizer.schedule": "constant", "log.every": 1, "eval.every": 8, "checkpoint.every": 4,
    "guard.every": 3, "devices": 4,
}  # fmt: skip
# each compiles programs of its own: a random one is run, all with --every-case
STRATEGIES = {
    "buckets": {"sync.bucket_bytes": 2048, "sync.algorithm": "ring"},
    "zero": {"sync.shard_optimizer": True, "microbatches": 2},
    "shards": {"sync.logical_shards": 4},
    "local": {"sync.local_steps": 2, "sync.outer_momentum": 0.9},
    "top_k": {"sync.compression": "top_k"},
    "power": {"sync.compression": "power_sgd"},
    "half": {"compute_dtype": "float16"},
    "auto": {"sync.algorithm": "auto", "sync.tune": "start"},
}


def keys_of(folder, out, **keys):
    return BASE | {"out": str(folder / out)} | {k.replace("__", "."): v for k, v in keys.items()}


def here(keys, stop=None):
    """A run in this process, on emulated devices."""
    return run_training(load_config(None, list(keys.items())), stop_at=lambda t: t == stop)


def rows_of(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    columns = ("step", "loss", "accuracy", "nonfinite")
    return [tuple(np.nan if row[k] is None else row[k] for k in columns) for row in rows]


def close(a, b, rel):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one == pytest.approx(other, rel=rel, nan_ok=True)


@pytest.fixture(scope="module")
def work(start_processes):
    """(folder, todo) -> name -> what each of two processes with two devices found."""

    def work(folder, *todo):
        ended = start_processes(WORKER, folder, json.dumps(todo)).wait()
        assert [one.code for one in ended] == [0, 0], "".join(one.err[-2000:] for one in ended)
        return {
            name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
            for name, *_ in todo
        }

    return work


@pytest.fixture(scope="module")
def strategies(request):
    """The strategies that are tried this time."""
    if request.config.option.every_case:
        return STRATEGIES
    name = list(STRATEGIES)[np.random.default_rng(request.config.option.seed).integers(8)]
    return {name: STRATEGIES[name]}


@pytest.fixture(scope="module")
def job(work, strategies, tmp_path_factory):
    """What two processes did, and the folder."""
    folder = tmp_path_factory.mktemp("job")
    nan = keys_of(folder, "nan", guard__nonfinite="skip")
    found = work(
        folder,
        ["nan", "train", {"keys": nan, "bad": 3}],
        ["again", "train", {"keys": nan}],
        ["two", "train", {"keys": keys_of(folder, "two", devices=2), "stop": 4}],
        *(
            [name, "train", {"keys": keys_of(folder, name) | keys}]
            for name, keys in strategies.items()
        ),
        ["odd", "train", {"keys": keys_of(folder, "odd", devices=3)}],
        ["data", "other_data", {"keys": keys_of(folder, "data")}],
        ["start", "other_start", {"keys": BASE}],
        ["parts", "own_stream", {"keys": BASE, "size": 24}],
    )
    return folder, found


def test_r3_one_nan_is_skipped_by_all_and_the_rest_is_one_process(job, poison, tmp_path):
    folder, found = job
    poison(3)
    alone = here(keys_of(tmp_path, "nan", guard__nonfinite="skip"))
    close(rows_of(folder / "nan"), rows_of(tmp_path / "nan"), 1e-5)
    first, second = found["nan"]
    assert (first["devices"], first["nonfinite"], second["nonfinite"]) == (4, 1, 1)
    assert first["params_digest"] == second["params_digest"]
    assert first["eval"] == second["eval"]
    assert first["eval"] == pytest.approx(alone["eval"], rel=1e-5)
    environment = json.loads((folder / "nan" / "environment.json").read_text())
    assert (environment["processes"], environment["emulated"]) == (2, True)


def test_strategies_are_those_of_one_process(job, strategies, tmp_path):
    folder, found = job
    for name, keys in strategies.items():
        alone = here(keys_of(tmp_path, name) | keys)
        close(rows_of(folder / name), rows_of(tmp_path / name), 1e-4)
        first, second = found[name]
        assert first["params_digest"] == second["params_digest"], name
        if name == "shards":  # reproducible: whatever the processes
            assert first["params_digest"] == alone["params_digest"]


def test_d1_every_process_reads_its_own_rows(job):
    _, found = job
    loader = Loader(load_dataset("digits").train, BASE["global_batch"], seed=0)
    first, second = (found["nan"][rank]["reads"] for rank in (0, 1))
    assert list(first) == list(second) == [str(step) for step in range(BASE["steps"])]
    for step, rows in first.items():
        assert rows + second[step] == loader.indices(int(step)).tolist()


def test_evaluation_is_the_same_to_the_bit(job, tmp_path):
    folder, found = job
    shutil.copytree(folder / "nan", tmp_path / "nan")
    (tmp_path / "nan" / "summary.json").unlink()  # as if killed before it was written
    keys = keys_of(tmp_path, "nan", guard__nonfinite="skip", resume=True)
    for devices in (4, 1):
        alone = here(keys | {"devices": devices})
        assert alone["params_digest"] == found["nan"][0]["params_digest"]
        assert alone["eval"] == found["nan"][0]["eval"]
        (tmp_path / "nan" / "summary.json").unlink()


def test_mistakes_are_found_by_all(job):
    folder, found = job
    expected = {
        "again": f"out: {folder / 'nan'} holds a run; go on with it by --resume, or choose",
        "odd": "devices: 3 cannot be spread over 2 processes; expected a multiple of 2",
        "data": "data: the training data of process 1 are not those of process 0",
        "start": "processes start from different states: params/logits/bias on all 4 replicas",
        "parts": "batches: the batch of step 0 in process 1 is not that of process 0; expected",
    }
    for name, text in expected.items():
        for one in found[name]:
            assert one["mistake"].startswith(text), name


def test_c2_c11_stopped_and_resumed_on_two_one_and_two_processes(
    job, work, start_processes, tmp_path, rng
):
    """Two processes are asked to stop by a signal to one; another run goes on here in between."""
    folder, found = job
    # a request is noticed within a second: some hundred steps, whose rows and saves would take time
    rare = {"devices": 2, "checkpoint__every": 100, "eval__every": 0, "log__every": 10}
    long = keys_of(tmp_path, "asked", **rare, steps=20_000)
    argv = [f"--{key}={value}" for key, value in long.items()]
    asked = start_processes("-m", "jaxdp.train", *argv)
    asked.wait_until(lambda: (tmp_path / "asked" / "metrics.jsonl").exists())
    asked.signal(int(rng.integers(2)), signal.SIGTERM if rng.integers(2) else signal.SIGINT)
    first, second = asked.wait()
    assert (first.code, second.code) == (75, 75), first.err + second.err
    assert first.err == "asked to stop: saved; go on with the same command and --resume\n"
    assert (second.out, second.err) == ("", "")
    assert "Gloo" not in first.out
    stopped = json.loads((tmp_path / "asked" / "summary.json").read_text())
    assert stopped["stopped"]

    half = keys_of(folder, "two", devices=2, resume=True)
    assert found["two"][0]["stopped"]
    between = here(half, stop=6)
    assert (between["steps"], between["stopped"]) == (6, True)

    more = rare | {"steps": stopped["steps"] + 5}
    resumed = work(
        tmp_path,
        ["asked", "train", {"keys": keys_of(tmp_path, "asked", **more, resume=True)}],
        ["straight", "train", {"keys": keys_of(tmp_path, "straight", **more)}],
        ["two", "train", {"keys": half}],
    )
    digests = {name: one["params_digest"] for name, (one, _) in resumed.items()}
    assert digests["asked"] == digests["straight"]
    assert rows_of(tmp_path / "asked") == rows_of(tmp_path / "straight")
    here(keys_of(tmp_path, "alone", devices=2))
    close(rows_of(folder / "two"), rows_of(tmp_path / "alone"), 1e-5)

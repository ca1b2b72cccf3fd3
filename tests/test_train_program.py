"""`python -m jaxdp.train` as its users meet it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIGITS = str(ROOT / "configs" / "digits_mlp.yaml")


def short(out, **more):
    """The arguments of a run of sixty steps."""
    given = {"steps": 60, "eval__every": 0, "checkpoint__every": 10, "out": out} | more
    pairs = ((f"--{key.replace('__', '.')}", value) for key, value in given.items())
    return ("--config", DIGITS, *(word for pair in pairs for word in pair))


def start(*argv, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxdp.train", *map(str, argv)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(*argv, **environment):
    process = start(*argv, **environment)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            ["--optimizer.learning_rat", "1"],
            ["--optimizer.learning_rat: no such key; did you mean optimizer.learning_rate?"],
        ),
        (
            ["--steps", "many", "--global-batch", "96"],
            [
                "--steps: 'many' is not a whole number",
                "--global-batch: no such key; did you mean global_batch?",
            ],
        ),
        (
            ["--global_batch", "100", "--devices", "8"],
            [
                "--global_batch: 100 is not divisible by microbatches x devices = 1 x 8 = 8; the "
                "nearest valid values are 96 and 104"
            ],
        ),
        (
            ["--data.kind", "fashion_mnist", "--data.path", "/no/such/folder"],
            [
                "/no/such/folder: no file train-images-idx3-ubyte.gz or train-images-idx3-ubyte; "
                "run `apt-get install dataset-fashion-mnist`, or give the folder of the four files "
                "as data.path"
            ],
        ),
        (
            ["--resume"],
            [
                "resume: there is no run in runs/default, so there is nothing to resume; --resume "
                "auto starts afresh then, --out names another folder"
            ],
        ),
        (
            ["--config", "nowhere.yaml"],
            ["nowhere.yaml: no such file; expected a YAML file such as configs/digits_mlp.yaml"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = train(*argv, PYTHONPATH=str(ROOT))
    assert (code, out) == (2, "")
    assert err.splitlines() == lines
    assert list(tmp_path.iterdir()) == []


def test_f5_environment_variables_have_no_effect():
    argv = ("--config", DIGITS, "--print_config")
    plain = train(*argv)
    assert plain[0] == 0
    assert (
        train(*argv, STEPS="3", steps="3", DEVICES="7", MODEL__KIND="cnn", JAXDP_STEPS="9") == plain
    )


def test_help_and_print_config(tmp_path):
    code, out, _ = train("--help")
    assert code == 0
    assert "optimizer.learning_rate" in out
    code, text, _ = train("--config", DIGITS, "--print_config", "--optimizer.learning_rate", "3e-4")
    assert code == 0
    assert "learning_rate: 0.0003" in text
    (tmp_path / "c.yaml").write_text(text)
    assert train("--config", tmp_path / "c.yaml", "--print_config")[1] == text


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The undisturbed run."""
    out = tmp_path_factory.mktemp("straight") / "run"
    code, text, err = train(*short(out))
    assert (code, err) == (0, "")
    assert "done at step 60: accuracy" in text
    return summary(out)


def summary(out):
    return json.loads((out / "summary.json").read_text())


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# files of more than 60,000 bytes cannot be written: the first checkpoint, and the report
SMALL_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
from jaxdp.training import saving
saving._DELAYS_S = (0.1, 0.2)
from jaxdp.train import main
sys.exit(main())
"""


def test_a_save_that_fails_is_one_line(tmp_path):
    argv = short(tmp_path / "run", model__hidden="[512]", checkpoint__every=20)
    ended = subprocess.run(
        [sys.executable, "-c", SMALL_FILES, *map(str, argv)], capture_output=True, text=True,
        check=False, timeout=120,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},  # its files are too large, too
    )  # fmt: skip
    assert ended.returncode == 5
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"{tmp_path / 'run' / 'checkpoints'}: saving failed: ")
    assert len(line) < 400
    assert summary(tmp_path / "run")["error"] == line
    tries = [text for text in ended.stdout.splitlines() if text.startswith("warning: ")]
    assert [text.rpartition("; ")[2] for text in tries] == [
        "trying again in 0.1 s", "trying again in 0.2 s",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_c11_a_request_to_stop_saves_and_the_rest_is_the_same_to_the_bit(number, tmp_path):
    out = tmp_path / "run"
    # constant: the schedule may not depend on the steps, of which there must be time to stop in
    options = {"optimizer__schedule": "constant", "log__every": 1}
    process = start(*short(out, steps=6000, **options))
    wait_for(lambda: (out / "metrics.jsonl").exists(), process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75
    assert err == f"{number.name}: saved; go on with the same command and --resume\n"
    stopped = summary(out)
    assert stopped["stopped"]
    steps = stopped["steps"] + 20
    assert train(*short(out, steps=steps, resume=True, **options))[0] == 0
    assert train(*short(tmp_path / "straight", steps=steps, **options))[0] == 0
    assert summary(out)["params_digest"] == summary(tmp_path / "straight")["params_digest"]


def test_c4_c5_killed_at_random_times_it_goes_on_to_the_same_bits(straight, tmp_path, rng):
    out = tmp_path / "run"
    argv = short(out, checkpoint__every=3, resume="auto")
    for _ in range(4):
        process = start(*argv)
        # from before the first save to after the last step; most of the time goes into starting
        wait_for(lambda: (out / "environment.json").exists(), process)
        time.sleep(rng.uniform(0, 4))
        process.kill()
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
    code, _, err = train(*argv)
    assert code == 0, err
    assert summary(out)["params_digest"] == straight["params_digest"]
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))

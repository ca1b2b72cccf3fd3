import os
import signal
import subprocess
import sys
import time

import pytest

from jaxdp.check import main
from jaxdp.checking import Line, program
from jaxdp.config import load_config, to_yaml


def check(*arguments):
    command = [sys.executable, "-m", "jaxdp.check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_shipped_configuration():
    small = ("--model.hidden", "[8]", "--devices", 2)
    code, out, err = check("--config", "configs/digits_mlp.yaml", *small)
    assert (code, err) == (0, "")
    assert "2 emulated devices against 1" in out
    assert out.splitlines()[-1] == "the same training: 11 passed, 0 failed, 0 not applicable"


def test_the_configuration_is_printed_and_nothing_run(capsys, monkeypatch):
    monkeypatch.setattr(program, "check_and_tell", None)
    argv = ["--config", "configs/digits_mlp.yaml", "--steps", "700", "--print_config"]
    assert main(argv) == 0
    expected = to_yaml(load_config("configs/digits_mlp.yaml", (("steps", 700),)))
    assert capsys.readouterr() == (expected, "")


def test_a_sharded_optimizer_with_a_frozen_leaf(capsys):
    zero = ("--sync.shard_optimizer", "true", "--optimizer.freeze", "[hidden/00/bias]")
    assert main(["--model.hidden", "[8]", "--devices", "3", *zero]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1] == "the same training: 10 passed, 0 failed, 1 not applicable"


def test_a_fault_is_exit_code_3(capsys, monkeypatch):
    def run_check(subject, devices, on_line):
        lines = [Line("gradients", "pass", "right"), Line("weights", "fail", "wrong")]
        for line in lines:
            on_line(line)
        return lines

    monkeypatch.setattr(program, "run_check", run_check)
    assert main(["--model.hidden", "[8]", "--devices", "2"]) == 3
    *_, first, second, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["pass", "gradients", "right"]
    assert second.split() == ["fail", "weights", "wrong"]
    assert last.startswith("NOT the same training")


def test_local_sgd_is_not_held_against_one_device(capsys):
    small = ("--model.hidden", "[8]", "--devices", "2", "--global_batch", "96")
    assert main([*small, "--sync.local_steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "3 local steps" in out
    assert out.splitlines()[-1].endswith("6 passed, 0 failed, 5 not applicable")
    assert "same training" not in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_to_end_it_leaves_nothing(number, tmp_path):
    command = [sys.executable, "-m", "jaxdp.check", "--devices", "2"]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 200
        while not any(tmp_path.glob("jaxdp-check-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not any(tmp_path.iterdir())


def test_mistakes():
    assert check("--model.kind", "vgg")[0] == 2
    code, out, err = check("--optimizer.freeze", "[hiden/*]")
    assert (code, out) == (2, "")
    assert "'hiden/*' matches no parameter" in err
    assert "hidden/00/bias" in err
    code, out, err = check("--devices", 1)
    assert (code, out) == (2, "")
    assert err == "devices: 1; expected at least 2, to be held against one: --devices 4\n"
    code, out, err = check("--sync.algorithm", "auto", "--sync.tune_file", "none.json")
    assert (code, out) == (2, "")
    assert err.startswith("none.json: no such tuning file")

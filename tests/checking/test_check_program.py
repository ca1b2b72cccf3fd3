import subprocess
import sys


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


def test_a_sharded_optimizer_with_a_frozen_leaf():
    zero = ("--sync.shard_optimizer", "true", "--optimizer.freeze", "[hidden/00/bias]")
    code, out, err = check("--model.hidden", "[8]", "--devices", 3, *zero)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "the same training: 10 passed, 0 failed, 1 not applicable"


def test_another_algorithm_is_a_fault():
    local = ("--model.batch_norm", "local", "--model.channels", "[4]", "--devices", 2)
    code, out, _ = check("--config", "configs/digits_resnet.yaml", *local)
    assert code == 3
    assert out.splitlines()[-1].startswith("NOT the same training")


def test_local_sgd_is_not_held_against_one_device():
    small = ("--model.hidden", "[8]", "--devices", 2, "--global_batch", 96)
    code, out, err = check(*small, "--sync.local_steps", 3)
    assert (code, err) == (0, "")
    assert "3 local steps" in out
    assert out.splitlines()[-1].endswith("6 passed, 0 failed, 5 not applicable")
    assert "same training" not in out


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

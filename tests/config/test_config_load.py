"""Files and overrides to a configuration, or to all mistakes at once."""

import re

import pytest

from jaxdp.config import ALGORITHMS, Config, flatten, load_config, parse_args
from jaxdp.config.keys import KEYS
from jaxdp.config.kinds import Adam, Cnn, Mlp
from jaxdp.errors import Exit, UserError


def mistakes(line: str = "", file: str | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(file, parse_args(line.split(), "train").overrides)
    assert caught.value.code == Exit.USER
    return list(caught.value.lines)


@pytest.fixture
def yaml(tmp_path, monkeypatch):
    """Writes x.yaml into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "x.yaml").write_text(text)
        return "x.yaml"

    return write


def test_nothing_given_is_the_default():
    assert load_config(None) == Config()


def test_file_and_overrides(yaml):
    file = yaml("steps: 50\nmodel:\n  kind: cnn\n  channels: [8]\noptimizer: {learning_rate: 3e-4}")
    config = load_config(file, [("steps", 60), ("seed", 1), ("seed", 2)])
    assert config == Config(
        steps=60, seed=2, model=Cnn(channels=(8,)), optimizer=Adam(learning_rate=3e-4)
    )


def test_empty_sections(yaml):
    assert load_config(yaml("model: {}\nlog: {}\n")) == Config()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--optimizer.learning_rat 3", "no such key; did you mean optimizer.learning_rate?"),
        ("--learning_rate 3", "no such key; did you mean optimizer.learning_rate?"),
        ("--global-batch 3", "no such key; did you mean global_batch?"),
        ("--model.hiden 3", "no such key; did you mean model.hidden?"),
        ("--lerning_rate", "no such key; did you mean optimizer.learning_rate?"),
        ("--xyz 3", "no such key"),
        ("--global_batch 0", "0 is not allowed; expected a whole number of at least 1"),
        ("--checkpoint.keep 0", "0 is not allowed; expected a whole number of at least 1"),
        ("--steps abc", "'abc' is not a whole number"),
        ("--steps true", "true is not a whole number"),
        ("--steps null", "null is not a whole number"),
        ("--steps=", "null is not a whole number"),
        ("--steps 1E4", "10000.0 is not a whole number; write 10000"),
        ("--steps 1.5", "1.5 is not a whole number"),
        ("--steps [3]", "[3] is not a whole number"),
        ("--steps 1,000", "'1,000' is not a whole number"),
        (
            "--seed 4294967296",
            "4294967296 is not allowed; "
            "expected a whole number of at least 0 and at most 4294967295",
        ),
        ("--devices 0", "0 is not allowed; expected auto or a whole number of at least 1"),
        ("--devices all", "'all' is not allowed; expected auto or a whole number of at least 1"),
        (
            "--compute_dtype float64",
            "'float64' is not allowed; expected float32, bfloat16 or float16",
        ),
        ("--resume yes", "'yes' is not allowed; expected true, false or auto"),
        ("--resume 1", "1 is not allowed; expected true, false or auto"),
        ("--log.tensorboard on", "'on' is not true or false"),
        ("--out=", "'' is not allowed; expected non-empty text or null"),
        (
            "--sync.algorithm nccl",
            f"'nccl' is not allowed; expected {', '.join(ALGORITHMS[:-1])} or {ALGORITHMS[-1]}",
        ),
        ("--model.dropout 1", "1 is not allowed; expected a number of at least 0 and below 1"),
        ("--optimizer.learning_rate -1", "-1 is not allowed; expected a number above 0"),
        ("--optimizer.learning_rate .inf", "inf is not finite; expected a number above 0"),
        ("--optimizer.learning_rate .nan", "nan is not finite; expected a number above 0"),
        ("--optimizer.learning_rate nan", "'nan' is not a number"),
        ("--optimizer.clip_norm 0", "0 is not allowed; expected a number above 0 or null"),
        ("--eval.batch x", "'x' is not allowed; expected a whole number of at least 1 or null"),
        (
            "--model.hidden 256",
            "256 is not allowed; "
            "expected a list of whole numbers of at least 1; write [256] (with model.kind mlp)",
        ),
        (
            "--model.hidden 3,0,x",
            "[3, 0, 'x'] is not allowed; "
            "expected a list of whole numbers of at least 1 (with model.kind mlp)",
        ),
        (
            "--model.kind cnn --model.channels []",
            "[] is not allowed; expected a non-empty list of whole numbers of at least 1",
        ),
        (
            "--model.kind cnn --model.hidden 256,128",
            "[256, 128] is not a whole number (with model.kind cnn)",
        ),
        ("--model.kind vgg", "'vgg' is not allowed; expected mlp, cnn, resnet or gpt"),
        ("--model.kind 3", "3 is not allowed; expected mlp, cnn, resnet or gpt"),
        (
            "--optimizer.kind adm",
            "'adm' is not allowed; "
            "expected sgd, momentum, adam, adamw, lion or adafactor; did you mean adam?",
        ),
        ("--model mlp", "'mlp' is not allowed; expected keys such as model.kind"),
        ("--model.heads 3", "belongs to model.kind gpt, not mlp"),
        ("--data.context 64", "belongs to data.kind stdlib_text, text_file or tokens, not digits"),
    ],
)
def test_one_mistake(line, text):
    key = re.findall(r"--[^ =]+", line)[-1]
    assert mistakes(line) == [f"{key}: {text}"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--data.kind npz", "data.path: missing; data.kind npz needs it: non-empty text"),
        (
            "--devices 5",
            "global_batch: 96 is not divisible by microbatches x devices = 1 x 5 = 5; "
            "the nearest valid values are 95 and 100",
        ),
        (
            "--model.kind gpt",
            "data.kind: digits does not fit model.kind gpt; "
            "expected stdlib_text, text_file or tokens, or model.kind mlp, cnn or resnet",
        ),
    ],
)
def test_a_mistake_in_a_key_that_was_not_given(line, text):
    assert mistakes(line) == [text]


def test_all_mistakes_at_once(yaml):
    file = yaml(
        """\
steps: 10
modle: {kind: mlp}
model:
  kind: mlp
  hiden: [3]
  channels: [3]
  dropout: 2
optimizer:
  kind: adma
  learning_rate: -1
  lr: 3
checkpoint:
eval:
  every: 20
  batch: yes
steps: 20
log: {every: true}
global_batch: 97
"""
    )
    assert mistakes("--eval.every 30 --sed 3 --microbatches 2 --log.progress Rich", file) == [
        "x.yaml:16: steps: given twice, first in line 1",
        "x.yaml:2: modle: no such key; did you mean model?",
        "x.yaml:5: model.hiden: no such key; did you mean model.hidden?",
        "x.yaml:6: model.channels: belongs to model.kind cnn or resnet, not mlp",
        "x.yaml:7: model.dropout: 2 is not allowed; expected a number of at least 0 and below 1",
        "x.yaml:9: optimizer.kind: 'adma' is not allowed; "
        "expected sgd, momentum, adam, adamw, lion or adafactor; did you mean adam?",
        "x.yaml:11: optimizer.lr: no such key; did you mean optimizer.learning_rate?",
        "x.yaml:12: checkpoint: null is not allowed; expected keys such as checkpoint.every",
        "x.yaml:15: eval.batch: 'yes' is not allowed; "
        "expected a whole number of at least 1 or null",
        "x.yaml:17: log.every: true is not a whole number",
        "x.yaml:18: global_batch: 97 is not divisible by microbatches = 2; "
        "the nearest valid values are 96 and 98",
        "--sed: no such key; did you mean seed?",
        "--log.progress: 'Rich' is not allowed; expected auto, rich, plain or none",
    ]


def test_rules_run_beside_faults_in_other_keys():
    line = "--steps 5 --optimizer.warmup_steps 5 --optimizer.learning_rate 0 --data.kind npz"
    assert mistakes(line) == [
        "--optimizer.warmup_steps: 5 is not shorter than the run; expected fewer than steps = 5: "
        "a short run needs a short warm-up, such as optimizer.warmup_steps 0",
        "--optimizer.learning_rate: 0 is not allowed; expected a number above 0",
        "data.path: missing; data.kind npz needs it: non-empty text",
    ]


def test_rules_on_faulty_keys_do_not_run(yaml):
    assert mistakes("--optimizer.warmup_steps 5 --steps x") == [
        "--steps: 'x' is not a whole number"
    ]
    assert mistakes("--model.kind gpt", yaml("data: 3")) == [
        "x.yaml:1: data: 3 is not allowed; expected keys such as data.kind"
    ]


def test_switching_the_kind_leaves_the_keys_of_the_file(yaml):
    file = yaml("model:\n  kind: gpt\n  layers: 2\n  dropout: 0.1\ndata: {kind: stdlib_text}")
    assert mistakes("--model.kind cnn --data.kind digits", file) == [
        "x.yaml:3: model.layers: belongs to model.kind gpt, not cnn"
    ]


def test_an_override_replaces_a_mistake_of_the_file(yaml):
    assert load_config(yaml("steps: x"), [("steps", 3)]).steps == 3


def test_numbers_and_words_of_yaml_1_2(yaml):
    file = yaml("optimizer: {learning_rate: 1e-4, clip_norm: .5, eps: 1E4}\nsteps: 1_000\nout: no")
    flat = flatten(load_config(file))
    assert flat["optimizer.learning_rate"] == 1e-4
    assert flat["optimizer.clip_norm"] == 0.5
    assert flat["optimizer.eps"] == 1e4
    assert flat["steps"] == 1000
    assert flat["out"] == "no"


@pytest.mark.parametrize("prefix", ["", "JAXDP_", "JAXDP__"])
def test_environment_variables_have_no_effect(monkeypatch, prefix):
    for path in KEYS:
        for name in (path, path.replace(".", "__"), path.replace(".", "_")):
            monkeypatch.setenv(prefix + name, "77")
            monkeypatch.setenv((prefix + name).upper(), "77")
    assert load_config(None) == Config()
    assert load_config(None, [("model.dropout", 0.5)]).model == Mlp(dropout=0.5)


def test_sizes_are_read_with_their_units(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("sync: {bucket_bytes: 25M, first_bucket_bytes: 1048576}\n")
    sync = load_config(str(path)).sync
    assert (sync.bucket_bytes, sync.first_bucket_bytes) == (25 << 20, 1 << 20)
    given = [("sync.first_bucket_bytes", "26M")]
    with pytest.raises(UserError, match=r"--sync.first_bucket_bytes: 26M is more than .* = 25M"):
        load_config(str(path), given)
    for wrong in ("25MB", 0, True, 1.5):
        with pytest.raises(UserError, match="expected a size such as 25M, 512K"):
            load_config(None, [("sync.bucket_bytes", wrong)])


def test_home_is_what_a_tilde_means(yaml, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(yaml("out: ~/runs/a\ninit_from: ~/p.safetensors"))
    assert (config.out, config.init_from) == ("/home/me/runs/a", "/home/me/p.safetensors")
    auto = [("sync.algorithm", "auto"), ("sync.tune_file", "~/t.json")]
    assert load_config(None, auto).sync.tune_file == "/home/me/t.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('out: "\\U00110000"', "x.yaml: not a text file; expected YAML"),
        ('out: "a\\0b"', "x.yaml:1: out: 'a\\x00b' is not allowed; expected non-empty text or "
         "null"),
        ("steps: 10000000000", "x.yaml:1: steps: 10000000000 is not allowed; expected a whole "
         "number of at least 1 and at most 999999999"),
        ("checkpoint: {mean_time_to_failure: 1e305}", "x.yaml:1: checkpoint.mean_time_to_failure: "
         "1e+305 is not allowed; expected a number above 0 and at most 1000000"),
    ],
)  # fmt: skip
def test_values_that_nothing_can_be_made_of(yaml, text, words):
    assert mistakes("", yaml(text)) == [words]

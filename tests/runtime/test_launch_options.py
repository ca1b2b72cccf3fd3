"""The launcher's command line: mistakes are a line each, before anything is started."""

import sys

import pytest

from jaxdp import launch
from jaxdp.errors import UserError
from jaxdp.runtime.launch_options import parse_options
from jaxdp.runtime.launcher import (
    deadlines_of_several_hosts,
    device_shares,
    ineffective,
    is_loopback_form,
    resuming,
    uneven_gpus,
)

RUN = ["-m", "jaxdp.train"]
TWO = ["--nnodes", "2", "--coordinator", "h:1234", "--node-rank"]


def test_defaults_and_what_belongs_to_whom():
    found = parse_options(["--nproc", "2", "-m", "jaxdp.train", "--steps", "9", "-m", "x"])
    assert (found.module, found.arguments) == ("jaxdp.train", ("--steps", "9", "-m", "x"))
    assert (found.nproc, found.nnodes, found.node_rank) == (2, 1, 0)
    assert (found.max_restarts, found.min_nproc, found.grace_s) == (3, None, 30.0)
    assert found.coordinator is None


def test_torchruns_spelling():
    found = parse_options(["--nproc_per_node=2", "--max_restarts", "1", "--module", "jaxdp.train"])
    assert (found.nproc, found.max_restarts) == (2, 1)


@pytest.mark.parametrize("address", ["h:1", "10.0.0.1:65535", "[::1]:80"])
def test_addresses(address):
    assert parse_options(["--coordinator", address, *RUN]).coordinator == address


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "no program: expected -m MODULE at the end, see python -m jaxdp.launch --help"),
        (["-m"], "no program: expected -m MODULE at the end"),
        (["--nproc", "0", *RUN], "--nproc-per-node: 0 processes on"),
        (["--nproc", "two", *RUN], "--nproc-per-node/--nproc: invalid int value: 'two'"),
        (["--nprocs", "2", *RUN], "--nprocs: no such option; did you mean --nproc?"),
        (["--config", "c", *RUN], "--config: no such option; the program's own come after -m"),
        (["train.py", *RUN], "train.py: not an option; a file is run as a module: -m train"),
        (["--nnodes", "2", "--node-rank", "0", *RUN], "--coordinator: missing"),
        (["--nnodes", "2", "--coordinator", "h:1", *RUN], "--node-rank: missing; expected which"),
        ([*TWO, "2", *RUN], "--node-rank: 2; expected 0 to 1"),
        ([*TWO, "0", "--min-nproc", "1", *RUN], "--min-nproc: only on one host"),
        (["--nnodes", "0", *RUN], "--nnodes: 0; expected at least 1"),
        (["--coordinator", "h:99999", *RUN], "--coordinator: h:99999: port 99999 does not exist"),
        (["--coordinator-bind", "::", *RUN], "--coordinator-bind: only with --coordinator; give"),
        (["--coordinator", "h", *RUN], "--coordinator: h: expected HOST:PORT"),
        (["--coordinator", "::1:80", *RUN], "--coordinator: ::1:80: expected [ADDRESS]:PORT"),
        (["--max-restarts", "-1", *RUN], "--max-restarts: -1; expected 0 or more"),
        (["--min-nproc", "3", "--nproc", "2", *RUN], "--min-nproc: 3; expected 1 to 2"),
        (["--grace", "0", *RUN], "--grace: invalid number of seconds value: '0'"),
        (["--step-deadline", "inf", *RUN], "--step-deadline: invalid number of seconds value"),
        (["--log-dir", __file__, *RUN], f"--log-dir: {__file__} is a file"),
        (["--log-dir", f"{__file__}/a/b", *RUN], f"--log-dir: {__file__}/a/b is no folder: "),
        (["-m", "jaxdp.tran"], "-m jaxdp.tran: no such module; did you mean jaxdp.train?"),
        (["-m", "no_such_module"], "-m no_such_module: no such module"),
        (["-m", "jaxdp.train.x"], "-m jaxdp.train.x: no such module: jaxdp.train is no package"),
        (["-m", "jaxdp.data"], "-m jaxdp.data: a package without __main__"),
        (["-m", "jaxdp.compare"], "-m jaxdp.compare: it starts its processes itself: "),
        (["-m", "train.py"], "-m train.py: a file; expected the name of a module, without .py"),
    ],
)
def test_a_mistake_is_one_line(argv, line, capsys):
    with pytest.raises(UserError) as error:
        parse_options(argv)
    assert len(error.value.lines) == 1
    assert str(error.value).startswith(line)
    assert launch.main(argv) == 2
    assert capsys.readouterr().err == f"{error.value}\n"


def test_help(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    text = capsys.readouterr().out
    for words in ("--nproc-per-node", "--coordinator-bind", "--end-deadline", "75 saved"):
        assert words in text
    assert "0, 2, 3, 4, 5 and 75 end the job" in text


def test_a_module_is_looked_for_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "noisy_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "inner.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert parse_options(["-m", "noisy_package.inner"]).module == "noisy_package.inner"
    assert "noisy_package" not in sys.modules


@pytest.mark.parametrize("above", ["a_package", "folders"])
def test_a_module_below_folders_without_an_init(above, tmp_path, monkeypatch):
    inner = tmp_path / above / "deeper" / "deepest"
    inner.mkdir(parents=True)
    (inner / "train_it.py").write_text("")
    if above == "a_package":
        (tmp_path / above / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"{above}.deeper.deepest"
    assert parse_options(["-m", f"{name}.train_it"]).module == f"{name}.train_it"
    mistakes = {
        f"{name}.trainit": f"no such module; did you mean {name}.train_it?",
        f"{above}.other.train_it": "no such module",
        name: "a package without __main__; expected a module in it",
    }
    for module, told in mistakes.items():
        with pytest.raises(UserError) as error:
            parse_options(["-m", module])
        assert str(error.value) == f"-m {module}: {told}"


@pytest.mark.parametrize(
    ("given", "attempt", "expected"),
    [
        (["--config", "c"], 0, ["--config", "c", "--resume", "auto"]),
        (["--resume"], 0, ["--resume"]),
        (["--resume=false", "--steps", "3"], 0, ["--resume=false", "--steps", "3"]),
        (["--resume", "--steps", "3"], 1, ["--steps", "3", "--resume", "auto"]),
        (["--steps", "3", "--resume", "true"], 1, ["--steps", "3", "--resume", "auto"]),
    ],
)
def test_the_trainer_resumes(given, attempt, expected):
    assert resuming(given, attempt) == expected


def test_on_several_hosts_a_step_may_last_as_long_as_anothers_save():
    times = ["--step-deadline=5", "--save-deadline=9", "--evaluation-deadline=7"]
    found = parse_options([*TWO, "1", *times, "--start-deadline=3", *RUN])
    several = deadlines_of_several_hosts(found.deadlines)
    assert [several[phase] for phase in ("step", "save", "evaluation", "start")] == [9, 9, 9, 3]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ((0, 1), (2, 3))),  # Slurm's --gres
        ({"CUDA_VISIBLE_DEVICES": "GPU-5e, GPU-7a,GPU-11"}, ((0,), (1,))),
        ({"ROCR_VISIBLE_DEVICES": "4,6"}, ((0,), (1,))),
        ({"CUDA_VISIBLE_DEVICES": "3"}, ()),  # fewer than processes
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_LOCAL_DEVICE_IDS": "0"}, ()),
        ({"JAX_CUDA_VISIBLE_DEVICES": "0,1"}, ()),
    ],
)
def test_the_gpus_of_each_process(environ, expected):
    """As JAX counts them: from 0, among those that it may see."""
    assert device_shares(environ, 8, 2) == expected


@pytest.mark.parametrize(
    ("environ", "present", "nproc", "line"),
    [
        ({}, 8, 4, None),
        ({}, 0, 4, None),  # no NVIDIA
        ({}, 2, 4, "warning: 2 GPUs for 4 processes: each sees all; expected at most one process"),
        ({}, 3, 2, "3 GPUs for 2 processes: each gets 1, and 1 is left over"),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 3, 2, None),
        ({"CUDA_VISIBLE_DEVICES": "4"}, 8, 2, "warning: 1 GPU for 2 processes: each sees all"),
        ({"JAX_LOCAL_DEVICE_IDS": "0"}, 3, 2, None),  # the user's choice
    ],
)
def test_gpus_that_do_not_come_out_even_are_told(environ, present, nproc, line):
    told = uneven_gpus(environ, present, nproc)
    assert told is None if line is None else told.startswith(line)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--step-deadline", "9", *RUN], None),
        (["-m", "json.tool"], None),
        (["--step-deadline", "600", "-m", "json.tool"], None),
        (
            ["--step-deadline", "9", "--end-deadline", "7", "-m", "json.tool"],
            "--step-deadline, --end-deadline: without effect unless json.tool sends heartbeats, "
            "as jaxdp.train does",
        ),
    ],
)
def test_deadlines_of_a_program_that_may_send_no_heartbeats(argv, line):
    assert ineffective(parse_options(argv)) == line


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("localhost:1", True),
        ("127.0.0.2:1", True),
        ("[::1]:1", True),
        ("n1:1", False),
        ("10.0.0.1:1", False),
        ("[fd00::1]:1", False),
    ],
)
def test_addresses_that_reach_one_host_only(address, loopback):
    assert is_loopback_form(address) == loopback

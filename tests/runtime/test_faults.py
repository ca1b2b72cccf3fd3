"""Fault points: what is asked for happens, there, once; what cannot be meant is refused."""

import signal
import subprocess
import sys
import time

import pytest

from jaxdp.errors import UserError
from jaxdp.runtime.faults import (
    ACTIONS,
    Fault,
    FaultPoints,
    PlannedError,
    parse_faults,
)
from jaxdp.runtime.phases import INPUT, PHASES


def test_any_fault_is_written_and_read(rng):
    for phase in (*PHASES, INPUT):
        for action in ACTIONS:
            rank, step = (None if rng.random() < 0.3 else int(rng.integers(99)) for _ in range(2))
            words = ["*" if x is None else str(x) for x in (rank, step)]
            seconds = float(rng.uniform(0, 9)) if action == "slow" else 0.0
            more = [repr(seconds)] if action == "slow" else []
            text = ":".join([*words, phase, action, *more])
            other = Fault(1, 2, "save", "kill")
            assert parse_faults(f"{text}, 1:2:save:kill") == [
                Fault(rank, step, phase, action, seconds), other,
            ]  # fmt: skip
    assert parse_faults("") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", "no phase ''; expected start, compile"),
        ("1:4:stp:kill", "no phase 'stp'"),
        ("1:4:step:crash", "no action 'crash'; expected kill, term"),
        ("1:4:step", "no action ''"),
        ("one:4:step:kill", "rank 'one'; expected a whole number, or [*] for any"),
        ("1:-4:step:kill", "step '-4'"),
        ("1:4:step:slow", "slow:SECONDS"),
        ("1:4:step:slow:", "'' seconds; expected a number, 0 or more"),
        ("1:4:step:slow:nan", "'nan' seconds"),
        ("1:4:step:kill:9", "expected rank:step:phase:action"),
    ],
)
def test_a_fault_that_cannot_be_meant_is_one_line(text, said):
    with pytest.raises(UserError, match=f"^JAXDP_FAULTS: '{text.replace('*', '[*]')}': .*{said}"):
        parse_faults(f"*:*:step:kill,{text}")


def raised(points, phase, step):
    try:
        points.reach(phase, step)
    except PlannedError:
        return True
    return False


def test_a_fault_happens_where_it_was_asked_for_and_once_for_each_run_folder(tmp_path):
    # the same fault twice: the run that goes on meets it again
    faults = parse_faults("1:4:save:raise,1:4:save:raise")

    def points(rank, out="run"):
        return FaultPoints(faults, rank, tmp_path / out)

    everywhere = [(phase, step) for phase in (*PHASES, INPUT) for step in range(6)]

    def run(rank):
        own = points(rank)
        for at in everywhere:
            if raised(own, *at):
                return [at]
        return []

    assert run(rank=0) == []
    assert [run(rank=1) for _ in range(3)] == [[("save", 4)], [("save", 4)], []]
    assert raised(points(1, "another"), "save", 4)


def test_a_fault_of_any_rank_happens_in_the_first_that_comes(tmp_path, rng):
    faults = parse_faults("*:*:step:raise")
    ranks = [FaultPoints(faults, rank, tmp_path) for rank in rng.permutation(4)]
    assert [raised(rank, "step", 7) for rank in ranks] == [True, False, False, False]


def test_slow_is_slow_each_time(tmp_path):
    points = FaultPoints(parse_faults("0:*:input:slow:0.05"), 0, tmp_path)
    began = time.monotonic()
    for step in range(3):
        points.reach("input", step)
    assert time.monotonic() - began >= 0.15


CHILD = """
import sys
from pathlib import Path
from jaxdp.runtime.faults import FaultPoints, parse_faults
points = FaultPoints(parse_faults(f"0:1:step:{sys.argv[1]}"), 0, Path(sys.argv[2]))
points.reach("step", 1)
print("past it", flush=True)
"""


def test_each_action_ends_a_process_in_its_own_way(tmp_path):
    ends = {
        "kill": -signal.SIGKILL, "term": -signal.SIGTERM, "int": -signal.SIGINT, "exit": 1,
        "raise": 1, "stop": None, "hang": None,
    }  # fmt: skip
    assert ends.keys() | {"slow"} == ACTIONS.keys()
    children = {
        action: subprocess.Popen(
            [sys.executable, "-c", CHILD, action, tmp_path / action],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for action in ends
    }  # fmt: skip
    try:
        for action, end in ends.items():
            if end is not None:
                out, err = children[action].communicate(timeout=60)
                assert (children[action].returncode, out) == (end, "")
                assert ("PlannedError: a fault" in err) == (action == "raise")
        for action, end in ends.items():
            if end is None:
                deadline = time.monotonic() + 60
                while not list((tmp_path / action).rglob("*-*")) and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(0.1)
                assert children[action].poll() is None
    finally:
        for child in children.values():
            child.kill()
            child.communicate()

"""What launcher and workers write for each other is read back, and nothing that is not whole."""

import json

import pytest

from jaxdp.runtime import control
from jaxdp.runtime.control import Failure, Heartbeat
from jaxdp.runtime.phases import PHASES


@pytest.fixture
def beat(rng):
    rank, pid, step, beats = (int(x) for x in rng.integers(1, 2**31, 4))
    return Heartbeat(rank, pid, str(rng.choice(PHASES)), step, round(rng.uniform(0, 1e7), 6), beats)


def test_a_heartbeat_is_json_of_a_fixed_size(beat, tmp_path):
    longest = Heartbeat(10**6, 2**22, "evaluation", 2**63, 1e12, 2**63)
    for one in (beat, longest):
        record = one.record()
        assert (len(record), record[-1:]) == (control.RECORD_BYTES, b"\n")
        assert json.loads(record) == vars(one)
    control.heartbeat_file(tmp_path, beat.rank).write_bytes(beat.record())
    assert control.read_heartbeat(tmp_path, beat.rank) == beat


def test_what_is_not_whole_is_not_there(beat, tmp_path, rng):
    path = control.heartbeat_file(tmp_path, 3)
    assert control.read_heartbeat(tmp_path, 3) is None
    cut = beat.record()[: rng.integers(0, beat.record().index(b"}"))]
    for content in (cut, b'{"rank": 1}', b"[1]", b"\xff"):
        path.write_bytes(content)
        assert control.read_heartbeat(tmp_path, 3) is None, content


def test_a_failure_is_written_whole(tmp_path):
    failure = Failure(1, 77, "host", 1, "ValueError", 'a "word"\nänd', "tb", "step", 4, 1.5, "own")
    control.write_failure(tmp_path, failure)
    assert control.read_failure(tmp_path, 1) == failure
    assert control.read_failure(tmp_path, 0) is None
    assert [path.name for path in tmp_path.iterdir()] == ["error-1.json"]

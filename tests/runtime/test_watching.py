"""Who is stuck: decided from records alone, without a process."""

import numpy as np
import pytest

from jaxdp.runtime.control import Heartbeat
from jaxdp.runtime.phases import COMPILE, EVALUATION, PHASES, SAVE, START, STEP
from jaxdp.runtime.watching import Stuck, Watcher, describe, main_thread, stacks

DEADLINES = dict(zip(PHASES, (50.0, 40.0, 10.0, 20.0, 30.0, 5.0), strict=True))


def beat(rank, phase, step, number=1):
    return Heartbeat(rank, 100 + rank, phase, step, 0.0, number)


def watcher(*beats, at=0.0, beating=True):
    found = Watcher(range(len(beats)), DEADLINES, beating, at)
    found.look(dict(enumerate(beats)), range(len(beats)), at)
    return found


def look(found, *beats, at):
    """Looks every second until `at`, as the launcher does many times a second."""
    for now in np.arange(found._looked + 1, at + 1):
        found.look(dict(enumerate(beats)), range(len(beats)), min(now, at))


def test_each_phase_has_its_own_deadline(rng):
    for phase in rng.permutation(PHASES):
        found = watcher(beat(0, phase, 3))
        look(found, beat(0, phase, 3), at=DEADLINES[phase] + 0.5)
        assert found.stuck(DEADLINES[phase]) is None
        late = DEADLINES[phase] + 0.5
        assert found.stuck(late) == Stuck(0, phase, 3, late, DEADLINES[phase])


def test_a_beat_starts_the_time_anew():
    found = watcher(beat(0, STEP, 3))
    look(found, beat(0, STEP, 3), at=9.0)
    look(found, beat(0, STEP, 4, 2), at=12.0)
    assert found.stuck(18.0) is None
    assert found.stuck(23.0).step == 4


def test_the_rank_that_is_behind_is_named_whoever_is_silent_longer():
    found = watcher(beat(0, STEP, 8), beat(1, STEP, 6))
    look(found, beat(0, STEP, 8), beat(1, STEP, 7, 2), at=2.0)
    assert found.stuck(11.0) is None, "rank 0 waits for rank 1, which is within its time"
    assert found.stuck(13.0).rank == 1


def test_a_rank_may_wait_for_one_in_a_longer_phase():
    beats = beat(0, SAVE, 4), beat(1, STEP, 5)
    found = watcher(*beats)
    look(found, *beats, at=25.0)
    assert found.stuck(25.0) is None
    look(found, *beats, at=31.0)
    assert found.stuck(31.0)[:2] == (0, SAVE)


def test_within_a_step_the_order_is_the_loops():
    found = watcher(beat(0, EVALUATION, 4), beat(1, STEP, 4))
    assert found.stuck(11.0).rank == 1


def test_a_stopped_rank_is_named_before_one_that_is_behind():
    found = watcher(beat(0, STEP, 4), beat(1, STEP, 5))
    assert found.stuck(11.0, lambda rank: rank == 1).rank == 1


def test_without_heartbeats_nobody_is_stuck_until_one_of_them_beats():
    found = watcher(None, None, beating=False)
    assert found.stuck(1e9) is None
    look(found, beat(0, COMPILE, 0), None, at=1.0)
    assert found.beats
    assert found.stuck(51.5)[:3] == (1, START, None)


def test_a_rank_that_has_ended_is_not_stuck():
    found = watcher(beat(0, STEP, 9), beat(1, STEP, 2))
    found.look({0: beat(0, STEP, 9), 1: beat(1, STEP, 2)}, [0], 1.0)
    assert found.stuck(11.0).rank == 0
    assert found.place(1) == (STEP, 2)
    assert found.farthest == 9


def test_time_in_which_the_launcher_did_not_run_does_not_count():
    found = watcher(beat(0, STEP, 3))
    found.look({0: beat(0, STEP, 3)}, [0], 1000.0)
    assert found.stuck(1000.0) is None
    look(found, beat(0, STEP, 3), at=1011.0)
    assert found.stuck(1011.0).rank == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_the_line(stopped):
    line = describe(Stuck(2, STEP, 7, 61.23, 60.0), stopped)
    assert line.startswith(
        "rank 2 is stuck in phase step at step 7: no heartbeat for 61.2 s, allowed are 60 s"
    )
    assert ("SIGSTOP" in line) == stopped


DUMP = """\
Thread 0x00007f01 (most recent call first):
  File "pool.py", line 5 in wait

Current thread 0x00007f02 (most recent call first):
  File "data.py", line 12 in read
  File "loop.py", line 3 in fit
"""


def test_the_stack_of_the_main_thread_is_the_newest_dumps_last():
    assert main_thread(DUMP + DUMP.replace("data.py", "disk.py")) == [
        'File "disk.py", line 12 in read',
        'File "loop.py", line 3 in fit',
    ]
    assert main_thread("") == []


def test_stacks_of_the_stuck_rank_come_first(tmp_path):
    (tmp_path / "stacks-0.txt").write_text(DUMP)
    (tmp_path / "stacks-2.txt").write_text(DUMP)
    lines = stacks(tmp_path, range(3), 2)
    assert [line[:6] for line in lines if line.startswith("rank")] == ["rank 2", "rank 0"]
    assert lines[1] == '  File "data.py", line 12 in read'

"""Which failure came first, in which words, and the code it comes to."""

import errno
import signal
from dataclasses import replace

import pytest

from jaxdp.runtime.control import Failure
from jaxdp.runtime.failing import (
    Death,
    Told,
    asked_to_end,
    exit_status,
    first_failure,
    is_failure,
    not_started,
    outcome,
    tell,
)

WRITTEN = Failure(0, 9, "here", 1, "ValueError", "bad\nrecord", "Trace..", "step", 7, 5.0, "own")


def test_a_rank_that_failed_by_itself_comes_before_its_victims():
    deaths = [Death(0, 6, 1.0), Death(1, -9, 2.0), Death(2, 0, 0.5), Death(3, -9, 0.1, ours=True)]
    assert first_failure(deaths, {}).rank == 1
    peers = {0: replace(WRITTEN, code=1, cause="peer", time=0.0)}
    assert first_failure([Death(0, 1, 1.0), Death(1, -9, 2.0)], peers).rank == 1


def test_of_several_the_earliest_by_what_they_wrote():
    deaths = [Death(0, 1, 8.0), Death(1, 1, 8.0)]
    written = {0: WRITTEN, 1: replace(WRITTEN, rank=1, time=4.0)}
    assert first_failure(deaths, written).rank == 1


def test_what_a_rank_wrote_counts_though_it_was_killed_before_it_left():
    deaths = [Death(0, -9, 2.0, ours=True), Death(1, 6, 1.0)]
    written = {0: replace(WRITTEN, code=4), 1: replace(WRITTEN, rank=1, code=6, cause="peer")}
    first = first_failure(deaths, written)
    assert first.rank == 0
    assert tell(first, written[0], "", (None, None)).code == 4


def test_a_request_that_was_written_is_no_failure():
    written = {0: replace(WRITTEN, code=130, kind="KeyboardInterrupt")}
    assert first_failure([Death(0, 130, 1.0), Death(1, 75, 2.0)], written) is None


def test_only_victims():
    assert first_failure([Death(0, 6, 2.0), Death(1, 6, 1.0)], {}).rank == 1
    assert first_failure([Death(0, 0, 2.0), Death(1, 75, 1.0)], {}) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_request_is_no_failure(number):
    for code in (-number, 128 + number):
        assert asked_to_end(code) == number
        assert not is_failure(Death(0, code, 0.0))
        assert exit_status(code) == 128 + number


def test_words():
    at = ("step", 7)
    killed = tell(Death(1, -9, 0.0), None, "last\nwords", at)
    assert killed.line.startswith("rank 1 was killed by SIGKILL")
    assert killed.line.endswith("in phase step at step 7")
    assert (killed.code, killed.details, killed.step) == (137, "last\nwords", 7)
    told = tell(Death(0, 1, 0.0), WRITTEN, "noise", ("step", 3))
    assert told.line == "rank 0 failed in phase step at step 7: ValueError: bad"
    assert told.details == "Trace.."
    named = replace(WRITTEN, message="ValueError: bad")
    assert tell(Death(0, 1, 0.0), named, "", ("step", 3)).line == told.line
    unknown = tell(Death(0, 3, 0.0), None, "", (None, None))
    assert unknown == Told(0, 3, "rank 0 ended with code 3", "", None, None)
    assert "signal 99" in tell(Death(0, -99, 0.0), None, "", (None, None)).line


def test_of_an_error_stream_the_traceback_is_told():
    tail = "warning\nTraceback (most recent call last):\n  File ..\nValueError: no\nlast"
    told = tell(Death(0, 1, 0.0), None, tail, (None, None))
    assert told.details.splitlines()[0] == "Traceback (most recent call last):"
    assert told.details.splitlines()[-1] == "last"
    told = tell(Death(0, 1, 0.0), None, "\n".join(map(str, range(99))), (None, None))
    assert told.details.splitlines() == [str(i) for i in range(59, 99)]


def test_a_mistake_of_the_user_is_his_line_alone():
    mistake = "--steps: 'many' is not a whole number"
    assert tell(Death(1, 2, 0.0), None, mistake + "\n", ("start", 0))[2:4] == (mistake, "")
    written = replace(WRITTEN, code=2, message=mistake)
    assert tell(Death(1, 2, 0.0), written, "noise", ("start", 0))[2:4] == (mistake, "")


FAILED = Told(0, 1, "", "", None, None)
LOST = Told(0, 6, "", "", None, None)


@pytest.mark.parametrize(
    ("codes", "told", "request_", "code"),
    [
        ([0, 0], None, None, 0),
        ([75, 75], None, None, 75),
        ([75, -9], None, signal.SIGTERM, 75),
        ([0, 0], None, signal.SIGTERM, 0),
        ([-15, -15], None, signal.SIGTERM, 143),
        ([-9, -15], None, signal.SIGINT, 130),
        ([1, -9], FAILED, None, 1),
        ([1, 75], FAILED, signal.SIGTERM, 1),
        ([6, -15], LOST, signal.SIGTERM, 143),
        ([6, 75], LOST, signal.SIGTERM, 75),
        ([-9, -9], LOST, None, 6),
    ],
)
def test_the_code_of_an_attempt(codes, told, request_, code):
    deaths = [Death(r, c, 0.0, ours=c == -9) for r, c in enumerate(codes)]
    assert outcome(deaths, told, request_, len(codes)) == code


@pytest.mark.parametrize("codes", [[], [0], [0, -9]])
def test_a_job_asked_to_end_before_all_ranks_were_done_is_not_done(codes):
    deaths = [Death(r, c, 0.0, ours=c == -9) for r, c in enumerate(codes)]
    assert outcome(deaths, None, signal.SIGTERM, 2) == 143


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u, or the pids limit"),
        (BlockingIOError(errno.EAGAIN, "busy"), "ulimit -u, or the pids limit"),
        (OSError(errno.EMFILE, "Too many open files"), "open files (ulimit -n)"),
    ],
)
def test_a_limit_is_named_and_no_restart_is_tried(error, limit):
    told = not_started(3, error)
    assert told.line.startswith("rank 3 cannot be started: too many")
    assert limit in told.line
    assert (told.code, told.details) == (2, "")


def test_what_may_pass_is_tried_again():
    told = not_started(3, OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert told[1:3] == (6, "rank 3 cannot be started: Cannot allocate memory")

"""The lock on a run folder: one holder at a time, and none that is gone."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxdp.errors import StorageError, UserError
from jaxdp.runtime import exclusive, lease
from jaxdp.runtime.lease import NAME, Lease, check_free, read_lock
from jaxdp.runtime.owner import is_alive, read_owner, start_ticks, this_process


def stale(path, **changes):
    """A lock as a process that was killed leaves it, or as `changes` say."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    owner = this_process()._replace(pid=ended.pid, started=start_ticks(ended.pid))
    ended.wait()
    values = {"token": "a1", "beat": 3, "since": 1.7e9, "lease_s": 0.5, **owner._asdict()}
    path.write_text(json.dumps(values | changes))


def test_one_holder_at_a_time_and_nothing_left(tmp_path):
    threads = set(threading.enumerate())
    for _ in range(2):
        with Lease(tmp_path / NAME):
            check = "in use by a run of this very process"
            with pytest.raises(UserError, match=check):  # n2: one notebook, twice
                Lease(tmp_path / NAME)
            with pytest.raises(UserError, match=check):
                check_free(tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) <= threads
    check_free(tmp_path / NAME)


HOLD = """
import sys, time
from pathlib import Path
from jaxdp.runtime.lease import Lease
with Lease(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_c12_the_second_is_refused_and_a_killed_one_is_replaced_at_once(tmp_path):
    path = tmp_path / NAME
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        for attempt in (Lease, check_free):
            with pytest.raises(UserError) as refused:
                attempt(path)
            [line] = refused.value.lines
            assert f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}" in line
    finally:
        holder.kill()
    # not waited for: dead, though its number is still taken
    while start_ticks(holder.pid) is not None:
        time.sleep(0.01)
    with Lease(path):
        assert read_lock(path).owner.pid == os.getpid()
    holder.communicate()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{}, {"pid": os.getpid()}, {"pid": 2**22 + 5}, {"pid": 2**70}],
    ids=["dead", "number used again", "no such number", "no number"],
)
def test_a_process_of_this_machine_that_is_gone_is_known_at_once(changes, tmp_path):
    stale(tmp_path / NAME, lease_s=60.0, **changes)
    began = time.monotonic()
    with Lease(tmp_path / NAME):
        assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "changes",
    [{"place": "another machine"}, {"place": None}, {"started": None}, {"pid": "x"}],
)
def test_what_cannot_be_seen_is_waited_for_and_then_replaced(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 0.5)
    stale(tmp_path / NAME, **{"pid": os.getpid()} | changes)
    told, began = [], time.monotonic()
    with Lease(tmp_path / NAME, 0.5, told.append):
        assert time.monotonic() - began > 0.45
    [line] = told
    assert "waiting up to 0 s for a sign of it" in line
    assert list(tmp_path.iterdir()) == []


def test_another_machine_that_renews_is_left_alone(tmp_path):
    stale(tmp_path / NAME, place="another machine", host="elsewhere", lease_s=30.0)
    ended = threading.Event()

    def renew():
        for beat in range(4, 10_000):
            stale_values = json.loads((tmp_path / NAME).read_text()) | {"beat": beat}
            text = json.dumps(stale_values)
            with open(tmp_path / NAME, "r+") as file:
                file.write(text.ljust(400))
            if ended.wait(0.1):
                return

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(UserError, match=r"in use by process .* on elsewhere since"):
            Lease(tmp_path / NAME)
    finally:
        ended.set()
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"token": "x"}', "[" * 5000, "\0" * 512])
def test_a_file_that_says_nothing_is_replaced_when_nobody_touches_it(text, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 0.2)
    (tmp_path / NAME).write_text(text)
    with Lease(tmp_path / NAME, 0.2):
        pass
    assert list(tmp_path.iterdir()) == []


def test_things_in_the_way_are_one_line(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c").write_text("")
    for path in (tmp_path / "a", tmp_path / "b", tmp_path / "c" / NAME):
        with pytest.raises(StorageError, match=f"^{path}"):
            Lease(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["taken", "removed"])
def test_whoever_lost_it_saves_nothing_more(how, tmp_path):
    path = tmp_path / NAME
    with Lease(path) as mine:
        mine.check()
        path.unlink()
        if how == "taken":
            stale(path)
        with pytest.raises(StorageError, match=f"is now held by|{how}; two runs must not"):
            mine.check()
        assert mine.lost
    # the other's is spared
    assert path.exists() == (how == "taken")


def test_one_that_cannot_be_renewed_for_too_long_is_lost(tmp_path, monkeypatch):
    def away(*_):
        raise OSError(5, "Input/output error")

    with Lease(tmp_path / NAME, 0.3) as mine, monkeypatch.context() as patch:
        patch.setattr(lease.os, "pwrite", away)
        mine.check()  # once is nothing
        time.sleep(0.4)
        with pytest.raises(StorageError, match="could not be renewed for 0 s"):
            mine.check()


def test_it_is_renewed(tmp_path):
    with Lease(tmp_path / NAME, 0.3):
        before, deadline = read_lock(tmp_path / NAME).beat, time.monotonic() + 30
        while read_lock(tmp_path / NAME).beat < before + 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)


RACE = """
import sys, time
from pathlib import Path
from jaxdp.errors import UserError
from jaxdp.runtime import lease
path, put = Path(sys.argv[1]), lease.put
def slow(*arguments):  # others have the time to come between
    time.sleep(0.05)
    put(*arguments)
lease.put = slow
print("ready", flush=True)
sys.stdin.readline()
won = 0
for _ in range(int(sys.argv[2])):
    try:
        with lease.Lease(path):
            inside = path.with_name("inside")
            inside.touch(exist_ok=False)  # fails where two are inside
            time.sleep(float(sys.argv[3]))
            inside.unlink()
            won += 1
    except UserError:
        pass
print(won, flush=True)
"""


@pytest.mark.parametrize(("times", "stay_s"), [(1, 2), (40, 0)])
def test_of_many_that_race_for_a_stale_one_one_is_inside(times, stay_s, tmp_path):
    stale(tmp_path / NAME)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, tmp_path / NAME, str(times), str(stay_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(6)
    ]  # fmt: skip
    for racer in racers:
        racer.stdout.readline()
    for racer in racers:  # all at once
        racer.stdin.write("go\n")
        racer.stdin.flush()
    ended = [racer.communicate(timeout=120) for racer in racers]
    assert [err for _, err in ended] == [""] * 6
    won = sum(int(out) for out, _ in ended)
    assert won == 1 if times == 1 else won >= 1
    assert list(tmp_path.iterdir()) == []


def test_a_dead_claimant_is_replaced_in_its_turn(tmp_path):
    stale(tmp_path / NAME)
    stale(tmp_path / f"{NAME}.claim-a1", token="b2")
    with Lease(tmp_path / NAME):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_long_ago_is_removed(tmp_path):
    old, new = (tmp_path / f"{NAME}.{name}.partial" for name in ("old", "new"))
    for path, age in ((old, 1000), (new, 1)):
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    with Lease(tmp_path / NAME):
        assert sorted(tmp_path.iterdir()) == [tmp_path / NAME, new]


def test_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(exclusive.os, "link", refuse)
    stale(tmp_path / NAME)
    with Lease(tmp_path / NAME), pytest.raises(UserError, match="this very process"):
        Lease(tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []


def test_owners():
    me = this_process()
    assert is_alive(me)
    assert read_owner(me._asdict()) == me
    assert read_owner(me._asdict() | {"pid": "1"}) is None
    assert is_alive(me._replace(started=(me.started or 0) + 1)) is False
    assert is_alive(me._replace(place="elsewhere")) is None
    assert start_ticks(2**22 + 5) is None

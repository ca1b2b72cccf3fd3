"""Lines of many ranks: whole, with the rank before them, and nobody waits."""

import os
import subprocess
import sys
import time

import pytest

from jaxdp.runtime.output import Lines

# writes to its own outputs, so it needs a process
PROGRAM = """
import subprocess, sys, time
from pathlib import Path
from jaxdp.runtime.output import ERR, OUT, Output, RankOutput
output = Output(delay_s=float(sys.argv[1]))
"""


def written(body, delay_s=0.0, **more):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + body + "\noutput.close()", str(delay_s)],
        capture_output=True, text=True, timeout=60, check=True, **more,
    )  # fmt: skip


def test_lines_do_not_depend_on_how_they_were_cut(rng):
    lines = [bytes(rng.integers(97, 123, rng.integers(0, 30)).tolist()) for _ in range(40)]
    text = b"\n".join(lines) + b"\n"
    reader, found = Lines(), []
    for piece in np_split(rng, text):
        found += reader.feed(piece)
    assert found == lines
    assert reader.rest() == []


def np_split(rng, text):
    cuts = sorted(rng.integers(0, len(text), 20))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_a_line_without_an_end_is_cut_and_the_rest_is_shown():
    lines = Lines(longest=10)
    assert lines.feed(b"x" * 25) == [b"x" * 10, b"x" * 10]
    assert lines.rest() == [b"x" * 5]


def test_a_progress_bar_leaves_its_last_state():
    lines = Lines(longest=10)
    assert lines.feed(b"".join(b"\r%3d%%" % i for i in range(50))) == []
    assert lines.feed(b"\r100%\r\n") == [b"100%"]


def test_streams_stay_apart_and_each_line_has_its_rank():
    found = written(
        "output.show(0, OUT, b'one'); output.show(11, ERR, b'two'); output.say('launch: three')"
    )
    assert found.stdout == "[0] one\n"
    assert sorted(found.stderr.splitlines()) == ["[11] two", "launch: three"]


def test_words_that_are_no_text_and_descriptors_that_are_closed():
    assert written(r"output.say('bad \udcff name')").stderr == "bad ? name\n"
    body = (
        "read, write = os.pipe(); output.say('lost'); output.close()\n"
        "assert write > 2; os.set_blocking(read, False)\n"
        "try: sys.exit(os.read(read, 1))\n"
        "except BlockingIOError: pass"
    )
    program = PROGRAM.replace("output =", "import os; os.close(1); os.close(2); output =") + body
    subprocess.run([sys.executable, "-c", program, "0"], check=True, timeout=60)


def test_what_came_a_moment_before_a_failure_is_held_back():
    found = written(
        "output.show(0, OUT, b'old'); time.sleep(0.6)\n"
        "output.show(1, ERR, b'noise'); output.hold()\n"
        "output.show(0, ERR, b'more noise'); output.say('rank 2 failed'); print(output.release())\n"
        "output.show(0, OUT, b'new')",
        delay_s=0.5,
    )
    assert sorted(found.stdout.splitlines()) == ["2", "[0] new", "[0] old"]
    assert found.stderr == "rank 2 failed\n"


def test_too_slow_a_reader_misses_lines_and_is_told():
    body = (
        "import os; os.set_blocking(1, False)\n"
        "for i in range(3000): output.show(0, OUT, b'x' * 10_000)"
    )
    program = [sys.executable, "-c", PROGRAM + body + "\noutput.close()", "0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(1.0)
        out, err = process.communicate(timeout=60)
    lines = out.splitlines()
    assert len(lines) < 3000
    assert {len(line) for line in lines} == {10_004}
    left_out = int(err.split()[1])
    assert err.endswith(b"left out here: the reader of this output is too slow\n")
    assert len(lines) + left_out == 3000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_told_once():
    body = (
        "process = subprocess.Popen(['printf', 'a\\\\nb\\\\n'], stdout=-1, stderr=-1)\n"
        "rank = RankOutput(output, 3, process, Path('/dev/full')); process.wait(); rank.finish()"
    )
    found = written(body)
    assert found.stdout == "[3] a\n[3] b\n"
    assert found.stderr == (
        "launch: /dev/full: no more is written to it: No space left on device\n"
    )


def test_the_end_of_the_error_stream_is_kept():
    body = (
        "process = subprocess.Popen([sys.executable, '-c', 'import sys\\nfor i in range(500):\\n'\n"
        "  ' print(i, file=sys.stderr)\\nprint(1)'], stdout=-1, stderr=-1)\n"
        "rank = RankOutput(output, 3, process, None); process.wait(); rank.finish(20)\n"
        "output.close(); print('tail', *rank.tail().splitlines())"
    )
    tail = written(body).stdout.splitlines()[-1].split()
    assert tail == ["tail", *(str(i) for i in range(300, 500))]

"""`python -m jaxdp.compare` in processes of its own."""

import json
import os
import subprocess
import sys

import pytest

from jaxdp.collectives import ALGORITHMS


def compare(*argv, **environment):
    run = subprocess.run(
        [sys.executable, "-m", "jaxdp.compare", *map(str, argv)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["--algorithms", "rng,ring"], ["algorithms: rng is not known for all_reduce; expected"]),
        (["--min-bytes", "1M", "--max-bytes", "1K"], ["--max-bytes: 1024 is less than"]),
        (["--nproc", "1000"], ["--nproc-per-node: 1000 processes on"]),
        (["--devices", "0", "--iters", "0"], ["--devices: 0; expected", "--iters: 0; expected"]),
        (["--algorithms", " ,"], ["argument --algorithms: no name was given; see python"]),
        (["--algorithms", "ring, tree", "--tune"], ["--tune: psum must be among --algorithms"]),
        (["--draw", ","], ["argument --draw: no name was given; see python"]),
        (["--json", "/", "--csv", "/etc"], ["--json: / is a folder", "--csv: /etc is a"]),
        (["--min-bytes", "few"], ["argument --min-bytes: invalid number of bytes value"]),
        (["--size", "3"], ["unrecognized arguments: --size 3; see python -m jaxdp.compare --help"]),
        (["--tune-file", "x"], ["--tune-file: has no effect without --tune"]),
        (["--json", "/no/such/f.json"], ["--json: there is no folder /no/such"]),
        (["--report", "/no/such/f.html"], ["--report: there is no folder /no/such"]),
        (["--report", "f.txt"], ["--report: f.txt; expected a name that ends in .html"]),
        (["--draw", "ring", "--report", "f.html"], ["--draw: prints rounds and measures nothing"]),
        (["--plot", "f.foo"], ["--plot: f.foo; expected a name that ends in one of ."]),
        (["--plot", "f"], ["--plot: f; expected a name that ends in one of ."]),
        (["--html", "x.html"], ["--html: has no effect without --draw"]),
        (["--draw", "ring", "--html", "/no/such/f.html"], ["--html: there is no folder /no/such"]),
        (["--draw", "psum"], ["--draw: psum has no schedule for all_reduce; expected some of"]),
        (["--devices", "3", "--nproc", "2"], ["--devices: 3 cannot be spread over 2 processes"]),
        (["--model", "no.yaml"], ["no.yaml: no such file"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(argv, lines):
    code, out, err = compare(*argv)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == len(lines)
    assert all(line.startswith(start) for line, start in zip(err.splitlines(), lines, strict=True))


def test_one_process(tmp_path):
    code, out, err = compare(
        "--devices", 3, "--algorithms", "psum,ring,tree", "--max-bytes", "4K", "--iters", 2,
        "--json", tmp_path / "c.json", "--plot", tmp_path / "c.png",
        "--report", tmp_path / "c.html",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "3 emulated devices in one process: shared memory, not a network" in out
    assert "out of bounds values: 0 OK" in out
    assert len(json.loads((tmp_path / "c.json").read_text())["rows"]) == 6
    assert "<h1>all_reduce on 3 ranks, float32, sum</h1>" in (tmp_path / "c.html").read_text()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_two_processes_tune_and_auto_finds_it(tmp_path):
    argv = ("--nproc", 2, "--max-bytes", "1K", "--iters", 2)
    code, out, _ = compare(
        *argv, "--tune", "--tune-file", tmp_path / "t.json", "--csv", tmp_path / "c.csv",
        "--algorithms", "auto, psum, ring, tree, naive",
    )  # fmt: skip
    assert code == 0
    assert "2 processes on one machine over loopback (Gloo)" in out
    assert "Gloo]" not in out  # its greetings do not belong into a table
    [(key, entry)] = json.loads((tmp_path / "t.json").read_text())["entries"].items()
    assert "2 process(es), 2 ranks" in key
    assert all(best["algorithm"] in ALGORITHMS for best in entry["best"])  # never auto itself
    rows = (tmp_path / "c.csv").read_text().splitlines()
    assert len(rows) == 1 + 5
    assert all(row.split(",")[10] == "0" for row in rows[1:])


def test_a_process_that_fails_ends_all_and_its_code_is_kept():
    code, out, err = compare("--nproc", 2, "--algorithms", "hierarchical,rng")
    assert code == 2
    assert "rng is not known for all_reduce" in err
    assert out == ""


def test_draw():
    code, out, _ = compare("--draw", "ring", "--devices", 3)
    assert code == 0
    assert out.splitlines()[2] == "all_reduce, 3 ranks, 3 chunks, 4 rounds"
    assert out.splitlines()[3] == "round   1  0>1 c2+   1>2 c0+   2>0 c1+"


def test_draw_as_a_page(tmp_path):
    path = tmp_path / "ring.html"
    code, out, _ = compare("--draw", "tree,ring", "--devices", 3, "--html", path)
    assert code == 0
    assert str(path) in out
    assert path.read_text().startswith("<!doctype html>")

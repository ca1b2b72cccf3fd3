"""The tests' own machinery."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.parametrize("i", range(4))
def test_tells_its_draw(i, request, rng):
    folder = request.config.rootpath
    (folder / f"{i}.draw").write_text(f"{request.config.option.seed} {rng.integers(2**32)}")
"""


def draws(folder, *options):
    """(seed that was printed, what each test drew) of a run."""
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    printed = re.search(r"seed of random inputs: (\d+)", done.stdout)
    assert printed, done.stdout
    return printed[1], [path.read_text() for path in sorted(folder.glob("*.draw"))]


def test_the_seed_that_is_printed_is_the_workers_and_repeats_them(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_draws.py").write_text(TESTS)
    seed, drawn = draws(tmp_path, "-n", "2")
    assert [line.split()[0] for line in drawn] == [seed] * 4
    assert len(set(drawn)) == 4
    assert draws(tmp_path, "--seed", seed) == (seed, drawn)

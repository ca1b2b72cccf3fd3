"""A few trials of `kill_points.py`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_c1_killed_anywhere_a_run_comes_to_the_same_end(rng):
    words = ["--trials", "2", "--only", "ZeRO", "--seed", str(rng.integers(2**31))]
    ended = subprocess.run(
        [sys.executable, ROOT / "tests" / "runtime" / "kill_points.py", *words],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 of 2 ended as the straight run" in ended.stdout

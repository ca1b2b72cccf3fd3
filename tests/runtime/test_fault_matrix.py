"""A random few trials of the fault matrix; `--every-case` runs it whole, which takes an hour."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_p3_killed_anywhere_a_job_comes_to_the_same_end(request, rng, tmp_path):
    seed, every_case = int(rng.integers(2**31)), request.config.option.every_case
    # deadlines that a loaded machine keeps; so what is stuck takes long, and is left to the whole
    words = ["--seed", seed, "--deadline", 60, "--start-deadline", 180, "--keep", tmp_path / "kept"]
    words += [] if every_case else ["--trials", 1, "--only", "kill"]
    ended = subprocess.run(
        [sys.executable, ROOT / "tests" / "runtime" / "fault_matrix.py", *map(str, words)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert every_case or "1 of 1 came through" in ended.stdout

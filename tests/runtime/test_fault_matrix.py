"""The fault matrix for five minutes, in a random order; `--every-case` runs it whole, in forty."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_p3_to_p7_whatever_happens_a_job_comes_to_the_same_end(request, rng, tmp_path):
    seed, every_case = int(rng.integers(2**31)), request.config.option.every_case
    # deadlines that a loaded machine keeps
    words = ["--seed", seed, "--deadline", 20, "--start-deadline", 60, "--keep", tmp_path / "kept"]
    words += [] if every_case else ["--minutes", 5]
    ended = subprocess.run(
        [sys.executable, ROOT / "tests" / "runtime" / "fault_matrix.py", *map(str, words)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counted = re.search(r"^(\d+) of (\d+) came through", ended.stdout, re.MULTILINE)
    assert counted, ended.stdout
    assert counted[1] == counted[2] != "0"

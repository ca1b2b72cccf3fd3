"""A job on two hosts, which are namespaces of this machine: the short cases of the script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("case", ["trains", "cut"])
def test_a_job_on_two_hosts(tmp_path, case):
    script = ROOT / "tests" / "runtime" / "two_hosts.py"
    ended = subprocess.run(
        [sys.executable, script, "--only", case, "--keep", tmp_path / "kept"],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if ended.returncode == 2 and "needs root" in ended.stderr:
        pytest.skip("needs root, and namespaces")
    assert ended.returncode == 0, ended.stdout + ended.stderr

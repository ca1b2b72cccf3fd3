"""Room on the disk, asked for before it is needed."""

import os
import subprocess

import pytest

from jaxdp.checkpoints import space
from jaxdp.checkpoints.space import check_space, check_writable
from jaxdp.errors import StorageError


@pytest.mark.parametrize(("free", "fits"), [(3 * (10**6 + 65536), True), (3 * 10**6, False)])
def test_c6_a_disk_that_is_too_small_is_told_with_both_numbers(free, fits, tmp_path, monkeypatch):
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: type("U", (), {"free": free}))
    if fits:
        check_space(tmp_path, 10**6, 3)
        return
    with pytest.raises(StorageError) as refused:
        check_space(tmp_path, 10**6, 3)
    assert str(refused.value) == (
        f"{tmp_path}: 3 checkpoints of 1.1 MB need 3.2 MB, and 3.0 MB are free; make room, lower "
        "checkpoint.keep, or choose another folder with --out"
    )


@pytest.fixture
def read_only(tmp_path):
    """A folder in which nobody can write, root neither."""
    if os.geteuid():
        tmp_path.chmod(0o555)
        yield tmp_path
        tmp_path.chmod(0o755)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("root, and no right to mount: nothing here is read-only")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_read_only_folder(read_only, tmp_path_factory):
    with pytest.raises(StorageError, match=f"^{read_only}: cannot be written: "):
        check_writable(read_only)
    free = tmp_path_factory.mktemp("free")
    check_writable(free)
    assert list(free.iterdir()) == []

"""Saves that fail: told in one line, in time, with the checkpoints before them as they were."""

import os
import shutil

import jax
import numpy as np
import pytest

from jaxdp.checkpoints import Checkpoints, engine, manifest
from jaxdp.errors import StorageError


def test_a_save_that_fails_in_the_background_is_told_at_the_next_step(
    saved, state_of, tmp_path, monkeypatch
):
    state = state_of(4)
    with Checkpoints(tmp_path / "c", keep=9) as checkpoints:
        with monkeypatch.context() as broken:

            def full(*args):
                raise OSError(28, "No space left on device")

            broken.setattr(manifest, "write", full)
            checkpoints.save(4, state)
            checkpoints._writer._thread.join()
            assert checkpoints.failure
            with pytest.raises(StorageError, match=r"c: saving failed: No space left on device"):
                checkpoints.wait()
            assert {path.name for path in (tmp_path / "c").iterdir()} == {"1", "2", "3"}
        assert not checkpoints.failure  # told once
        checkpoints.save(4, state)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3, 4]
    with Checkpoints(tmp_path / "c") as checkpoints:
        found, _, _ = checkpoints.restore(state_of(0))
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_a_failed_save_is_told_although_it_cannot_be_cleared_away(
    saved, state_of, tmp_path, monkeypatch
):
    def refused(*args):
        raise OSError(24, "Too many open files")

    with Checkpoints(tmp_path / "c") as checkpoints:
        for module, name in ((manifest, "write"), (engine, "remove_given_up")):
            monkeypatch.setattr(module, name, refused)
        checkpoints.save(4, state_of(4))
        with pytest.raises(StorageError, match=r"saving failed: .*Too many open files"):
            checkpoints.wait()
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "c")  # by hand, or a disk that is away
        with pytest.raises(StorageError, match="saving failed"):
            checkpoints.save(4, state_of(4))


def test_what_cannot_be_deleted_does_not_undo_a_save(saved, state_of, tmp_path, monkeypatch):
    def refused(*args):
        raise StorageError("cannot be listed")

    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        monkeypatch.setattr(checkpoints, "_delete_old", refused)
        checkpoints.save(4, state_of(4))
    assert "4" in os.listdir(tmp_path / "c")


def test_a_save_of_ours_that_orbax_refuses_is_one_line(saved, state_of, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("zstd\nand so on")

    with Checkpoints(tmp_path / "c") as checkpoints:
        monkeypatch.setattr(checkpoints._writer._orbax, "save", broken)
        with pytest.raises(StorageError, match=r"saving failed: zstd$"):
            checkpoints.save(4, state_of(4))
        monkeypatch.undo()
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(4, state_of(4), {"x": {1, 2}})

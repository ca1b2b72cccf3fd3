"""Checkpoints: what is saved is what comes back, whatever happens around it."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import all_reduce_sync, make_train_step, power_sgd_sync, top_k_sync
from jaxdp.checkpoints import Checkpoints, files
from jaxdp.checkpoints.folders import move_aside
from jaxdp.errors import StorageError


def loss(params, model_state, batch, keys):
    return ((batch["x"] @ params["w"]) ** 2).sum(), jnp.float32(len(batch["x"]))


def make(mesh, rng, width=7, optimizer=None):
    step = make_train_step(loss, optimizer or optax.adam(0.1), all_reduce_sync("ring"), mesh)
    state = step.init({"w": rng.normal(size=(5, width)).astype(np.float32)})
    return step, state, lambda: step.place({"x": rng.normal(size=(24, 5)).astype(np.float32)})


def assert_same(a, b):
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b
    )


def test_c8_saves_of_donated_states_hold_the_right_contents(mesh_of, rng, tmp_path):
    step, state, batch = make(mesh_of(4), rng)
    expected = {}
    with Checkpoints(tmp_path / "c", keep=50) as checkpoints:
        for t in range(1, 51):
            state, _ = step(state, batch())
            expected[t] = jax.device_get(state)
            checkpoints.save(t, state)
    with Checkpoints(tmp_path / "c", keep=50) as checkpoints:
        for t in reversed(range(1, 51)):
            assert checkpoints.steps()[-1] == t
            restored, _, lines = checkpoints.restore(state)
            assert lines == []
            assert_same(restored, expected[t])
            move_aside(tmp_path / "c", t)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_c2_saved_on_four_devices_restored_on_others(n, mesh_of, rng, tmp_path):
    step, state, batch = make(mesh_of(4), rng)
    state, _ = step(state, batch())
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, state, {"note": "four"})
    other, like, batch = make(mesh_of(n), rng)
    other(like, batch())  # compiles
    like = other.init({"w": np.zeros((5, 7), np.float32)})
    with Checkpoints(tmp_path / "c") as checkpoints:
        restored, meta, _ = checkpoints.restore(like)
    assert meta == {"note": "four"}
    assert_same(restored, state)
    other(restored, batch())
    assert other.run._cache_size() == 1  # c10: the restored state compiles nothing again


DAMAGES = {
    "emptied": lambda step: [shutil.rmtree(path) for path in step.iterdir() if path.is_dir()],
    "item missing": lambda step: shutil.rmtree(step / "state"),
    "metadata missing": lambda step: (step / "state" / "_METADATA").unlink(),
    "metadata truncated": lambda step: (step / "state" / "_METADATA").write_text('{"tree'),
    "data missing": lambda step: shutil.rmtree(step / "state" / "d"),
    "database missing": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
# Orbax's reader leaves callbacks behind when it fails, whose event loop is closed by then
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_c3_a_damaged_step_is_moved_aside_and_the_one_before_used(damage, mesh_of, rng, tmp_path):
    step, state, batch = make(mesh_of(2), rng)
    with Checkpoints(tmp_path / "c") as checkpoints:
        for t in (1, 2):
            state, _ = step(state, batch())
            checkpoints.save(t, state)
            if t == 1:
                first = jax.device_get(state)
    DAMAGES[damage](tmp_path / "c" / "2")
    with Checkpoints(tmp_path / "c") as checkpoints:
        restored, _, [line] = checkpoints.restore(state)
        assert line.startswith("checkpoint 2 is damaged: ")
        assert (tmp_path / "damaged" / "2").is_dir()
        assert_same(restored, first)
        checkpoints.save(2, state)  # the run goes on and saves that step again
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def owing(mesh, rng, sync):
    """A step, its state after two of them, and a batch."""
    step = make_train_step(loss, optax.adam(0.1), sync, mesh)
    state = step.init({"w": rng.normal(size=(5, 7)).astype(np.float32)})
    batch = step.place({"x": rng.normal(size=(24, 5)).astype(np.float32)})
    for _ in range(2):
        state, _ = step(state, batch)
    return step, state, batch


@pytest.mark.parametrize("sync", [top_k_sync(0.1), power_sgd_sync(1)], ids=["top_k", "power_sgd"])
def test_residuals_are_resumed_to_the_bit_and_spread_over_other_devices(
    sync, mesh_of, rng, tmp_path
):
    step, state, batch = owing(mesh_of(4), rng, sync)
    saved = jax.device_get(state)
    assert np.abs(saved.sync_state["residual"]["w"]).max() > 0
    with Checkpoints(tmp_path / "c", form=step.form) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()
        straight, _ = step(state, batch)
        restored, _, _ = checkpoints.restore(straight)
        assert_same(restored, saved)
        assert_same(step(restored, batch)[0], straight)
        for n in (2, 8, 1):
            _, like, _ = owing(mesh_of(n), rng, sync)
            restored, _, _ = checkpoints.restore(like)
            assert_same(restored._replace(sync_state=()), saved._replace(sync_state=()))
            now, before = (s.sync_state["residual"]["w"] for s in (restored, saved))
            assert now.sharding == like.sync_state["residual"]["w"].sharding
            np.testing.assert_allclose(np.asarray(now).sum(0), before.sum(0), atol=1e-5)
            for a, b in zip(restored.sync_state["start"], saved.sync_state["start"], strict=True):
                assert (np.asarray(a) == b[0]).all()
    with Checkpoints(tmp_path / "c") as checkpoints:  # nobody said how to spread them
        _, like, _ = owing(mesh_of(2), rng, sync)
        with pytest.raises(StorageError, match=r"residual/w is float32\[4, 5, 7\] there and"):
            checkpoints.restore(like)


def test_another_shape_or_optimizer_is_refused_by_name(mesh_of, rng, tmp_path):
    _, state, _ = make(mesh_of(2), rng)
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        _, wider, _ = make(mesh_of(2), rng, width=8)
        with pytest.raises(
            StorageError, match=r"params/w is float32\[5, 7\] there and float32\[5, 8"
        ):
            checkpoints.restore(wider)
        _, plain, _ = make(mesh_of(2), rng, optimizer=optax.sgd(0.1))
        with pytest.raises(StorageError, match=r"opt_state.* and absent in this run"):
            checkpoints.restore(plain)


def test_where_nothing_can_be_read_nothing_is_moved(mesh_of, rng, tmp_path, monkeypatch):
    _, state, _ = make(mesh_of(1), rng)
    with Checkpoints(tmp_path / "c") as checkpoints:
        for t in (1, 2):
            checkpoints.save(t, state)
        checkpoints.wait()

        def broken(*args):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(files, "digest_of_file", broken)
        with pytest.raises(StorageError, match="Input/output error"):
            checkpoints.restore(state)
        assert checkpoints.steps() == [1, 2]
        with pytest.raises(StorageError, match="a later step is there"):
            checkpoints.save(0, state)


def test_keep(mesh_of, rng, tmp_path):
    _, state, _ = make(mesh_of(1), rng)
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for t in (3, 5, 8):
            checkpoints.save(t, state)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 8]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot hold checkpoints"):
        Checkpoints(tmp_path / "file" / "c")

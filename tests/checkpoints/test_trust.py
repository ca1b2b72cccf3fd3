"""A checkpoint is trusted where it verifies: end to end, and whatever lies in its folder."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.checkpoints import Checkpoints, contents, engine, files, folders, leaves, manifest
from jaxdp.checkpoints.restoring import verified
from jaxdp.errors import StorageError, UserError
from jaxdp.guard import fingerprint_numpy
from jaxdp.mesh import AXIS, replicate
from jaxdp.state import TrainState


def assert_same(a, b):
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b
    )


def restore(folder, like, **options):
    with Checkpoints(folder, **options) as checkpoints:
        return checkpoints.restore(like)


def reseal(folder, **changes):
    """Changes fields of a manifest as somebody would who knows how."""
    held = manifest.read(folder)
    fields = {name: getattr(held, name) for name in ("step", "leaves", "files", "facts", "run")}
    manifest.write(folder, manifest.Manifest(**fields | changes))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32"])
def test_the_digest_of_a_leaf_is_the_same_for_every_number_of_devices(name, mesh_of, rng):
    # below and above the size up to which the host hashes
    for shape in [(), (8, 3), (8, leaves._BLOCK_ELEMENTS), (8, 40_000, 2)]:
        x = np.asarray(100 * rng.normal(size=shape)).astype(jnp.dtype(name))
        expected = "".join(f"{word:08x}" for word in fingerprint_numpy(x))
        assert leaves.digest_leaf(x) == expected
        for n in (1, 2, 8):
            for spec in {P(), P(AXIS) if shape else P()}:
                sharding = NamedSharding(mesh_of(n), spec)
                assert leaves.digest_leaf(jax.device_put(x, sharding)) == expected
    placed = jax.device_put(x, NamedSharding(mesh_of(4), P(AXIS)))
    total = np.asarray(leaves.digest_global(placed))
    assert "".join(f"{word:08x}" for word in total) == expected


def test_the_manifest_says_what_was_saved(saved, tmp_path):
    held = verified(tmp_path / "c" / "3")
    assert (held.step, held.run) == (3, {"note": 3})
    assert held.leaves["params/w"].shape == (5, 7)
    assert held.leaves["params/b"].dtype == "bfloat16"
    assert held.leaves.keys() == {
        "params/w", "params/b", "opt_state/0", "step", "skipped", "nonfinite", "nonfinite_run"
    }  # fmt: skip
    assert held.facts["devices"] == held.facts["processes"] == 1
    assert held.facts["versions"]["jax"] == jax.__version__
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert names == {"1", "2", "3"}  # c5: complete, and nothing else, when the context is left


def test_values_that_fit_their_files_and_not_their_digest(saved, state_of, tmp_path):
    """The file layer is right by itself: what was read is held against what was saved."""
    newest, before = (verified(tmp_path / "c" / name) for name in "32")
    wrong = dict(newest.leaves) | {"params/w": before.leaves["params/w"]}
    reseal(tmp_path / "c" / "3", leaves=wrong)
    state, meta, [line] = restore(tmp_path / "c", state_of(0))
    assert "3 is damaged: params/w came back with other values than were saved; moved to" in line
    assert meta == {"note": 2}
    assert_same(state, saved[2])


def test_c7_a_copy_without_orbaxs_marks(saved, state_of, tmp_path):
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    marks = [p for p in (tmp_path / "copy").rglob("*") if p.name in manifest._MARKERS]
    assert len(marks) >= 3
    for path in marks:
        path.unlink()
    (tmp_path / "copy" / "3" / ".DS_Store").write_text("")  # copying may also add something
    state, _, lines = restore(tmp_path / "copy", state_of(0))
    assert lines == []
    assert_same(state, saved[3])


def test_no_step_of_a_later_version_is_moved(saved, state_of, tmp_path):
    body = json.loads((tmp_path / "c" / "3" / manifest.NAME).read_text()) | {"schema": 2}
    del body["seal"]
    text = json.dumps(body | {"seal": manifest._seal(body)})
    (tmp_path / "c" / "3" / manifest.NAME).write_text(text)
    with pytest.raises(StorageError, match="use the version that wrote it"):
        restore(tmp_path / "c", state_of(0))
    assert folders.steps_in(tmp_path / "c") == [1, 2, 3]


class Payload:
    """What runs when a pickle is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def fired(tmp_path):
    """A file that is there if a payload ran, and the payload."""
    path = tmp_path / "fired"
    payload = pickle.dumps(Payload(path))
    pickle.loads(payload)
    assert path.exists()
    path.unlink()
    return path, payload


def test_pickles_beside_the_data_are_not_loaded(saved, state_of, tmp_path, fired):
    step = tmp_path / "c" / "3"
    for path in [step, step / "state", step / "state" / "d", tmp_path / "c"]:
        for name in ("x.pkl", "aggregate", "0.npy"):
            (path / name).write_bytes(fired[1])
        np.save(path / "objects.npy", np.array([Payload(fired[0])], object), allow_pickle=True)
    state, _, lines = restore(tmp_path / "c", state_of(0))
    assert lines == []
    assert_same(state, saved[3])
    (step / "state" / "checkpoint").write_bytes(fired[1])  # a name of Orbax's before OCDBT
    _, _, [line] = restore(tmp_path / "c", state_of(0))
    assert "cannot be read: " in line
    assert "was added, and may be why" in line
    assert not fired[0].exists()


def test_pickles_in_place_of_the_data_are_not_loaded(saved, state_of, tmp_path, fired):
    for step in (2, 3):
        folder = tmp_path / "c" / str(step)
        for name in manifest.payload(folder):
            (folder / name).write_bytes(fired[1])
    # even where all digests are those of the payload
    reseal(tmp_path / "c" / "2", files=files.entries(folder, manifest.payload(folder)))
    state, _, lines = restore(tmp_path / "c", state_of(0))
    assert len(lines) == 2
    assert_same(state, saved[1])
    held = manifest.read(tmp_path / "damaged" / "2")
    with pytest.raises(StorageError, match="it cannot be read"):
        contents.norms(tmp_path / "damaged" / "2", held)
    assert not fired[0].exists()


def test_a_manifest_that_may_not_be_read_is_a_damaged_step(saved, state_of, tmp_path, monkeypatch):
    real = Path.is_symlink

    def refused(path):
        if path.parent.name == "3":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_symlink", refused)
    state, _, [line] = restore(tmp_path / "c", state_of(0))
    assert int(state.step) == 2
    assert line.startswith("checkpoint 3 is damaged: manifest.json cannot be read: Permission")


def test_thorough_reads_back_and_looks_at_all(saved, state_of, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "read_leaves", lambda folder: jax.device_get(state_of(9).params))
    with Checkpoints(tmp_path / "c", verify="thorough") as checkpoints:
        checkpoints.save(4, state_of(4))
        with pytest.raises(StorageError, match="came back with other values"):
            checkpoints.wait()
    monkeypatch.undo()
    with Checkpoints(tmp_path / "c", keep=9, verify="thorough") as checkpoints:
        checkpoints.save(4, state_of(4))
    (tmp_path / "c" / "2" / manifest.NAME).write_bytes(b"")
    assert restore(tmp_path / "c", state_of(0))[2] == []
    _, _, [line] = restore(tmp_path / "c", state_of(0), verify="thorough")
    assert (
        line
        == "checkpoint 2 is damaged: manifest.json is damaged: it is no JSON; moved to damaged/2"
    )
    assert folders.steps_in(tmp_path / "c") == [1, 3, 4]


def test_double_precision_of_one_thread_is_that_of_its_saves(state_of, rng, tmp_path):
    with jax.enable_x64(True):
        values = {"w": rng.normal(size=leaves._HASHED_ON_HOST_BYTES // 8 + 1)}
        state = replicate(jaxdp.data_mesh(jax.devices()[:1]), state_of(1)._replace(params=values))
        with Checkpoints(tmp_path / "c") as checkpoints:
            checkpoints.save(1, state)
            found, _, lines = checkpoints.restore(state)
        assert lines == []
        assert_same(found.params, values)


def test_two_leaves_of_one_path_are_refused(state_of, tmp_path):
    one = np.zeros(1)
    state = state_of(1)._replace(params={"a": {"b": one}, "a/b": one})
    with Checkpoints(tmp_path / "c") as checkpoints, pytest.raises(UserError, match="params/a/b"):
        checkpoints.save(1, state)


def test_a_step_that_is_there_is_not_saved_over(saved, state_of, tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(StorageError, match="a checkpoint of that step is there"):
            checkpoints.save(3, state_of(3))
        checkpoints.restore(state_of(0))
        checkpoints.save(3, state_of(3))  # resumed there and stopped before the next step
    assert_same(restore(tmp_path / "c", state_of(0))[0], saved[3])


def test_only_our_leftovers_are_removed_and_only_whole_steps_deleted(saved, state_of, tmp_path):
    folder = tmp_path / "c"
    for name in ("4.partial", "5.partial.orbax-checkpoint-tmp", "6.deleted", "mine.partial", "07"):
        (folder / name).mkdir()
    (folder / "7.partial").symlink_to(tmp_path)
    (folder / "1" / manifest.NAME).unlink()  # not ours any more
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(8, state_of(8))
    there = {path.name for path in folder.iterdir()}
    assert there == {"1", "3", "8", "mine.partial", "07", "7.partial"}


def save_as_before_manifests(folder, states):
    handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        for step, state in states.items():
            args = {
                "state": ocp.args.StandardSave(state._asdict()),
                "meta": ocp.args.JsonSave({"note": step}),
            }
            manager.save(step, args=ocp.args.Composite(**args))


def test_checkpoints_of_versions_before_manifests_are_taken_over(state_of, tmp_path):
    states = {step: state_of(step) for step in (1, 2)}
    save_as_before_manifests(tmp_path / "c", states)
    with pytest.raises(StorageError, match=r"no manifest[^$]*jaxdp.checkpoint adopt RUN"):
        restore(tmp_path / "c", state_of(0))
    assert folders.steps_in(tmp_path / "c") == [1, 2]  # nothing is moved
    contents.adopt(tmp_path / "c" / "2")
    with pytest.raises(UserError, match="has a manifest"):
        contents.adopt(tmp_path / "c" / "2")
    state, meta, lines = restore(tmp_path / "c", state_of(0, n=4))
    assert (meta, lines) == ({"note": 2}, [])
    assert_same(state, states[2])


SAVES = """
import sys, numpy as np
from pathlib import Path
from jaxdp.checkpoints import Checkpoints
from jaxdp.mesh import data_mesh, replicate
from jaxdp.state import TrainState
import jax
with Checkpoints(Path(sys.argv[1]), keep=2) as checkpoints:
    for step in range(1, 10**6):
        count = np.int32(0)
        params = {"w": np.full(200_000, step, np.float32)}
        state = TrainState(np.int32(step), count, count, count, params, {}, (), ())
        checkpoints.save(step, replicate(data_mesh(jax.devices()[:1]), state))
        checkpoints.wait()
        print(step, flush=True)
"""


def test_c4_killed_at_any_point_of_a_save(mesh_of, request, rng, tmp_path):
    like = TrainState(*[np.int32(0)] * 4, {"w": np.zeros(200_000, np.float32)}, {}, (), ())
    like = replicate(mesh_of(1), like)
    environment = os.environ | {"PYTHONPATH": str(Path(jaxdp.__file__).parents[1])}
    for trial in range(8 if request.config.option.every_case else 1):
        folder = tmp_path / str(trial) / "c"
        process = subprocess.Popen(
            [sys.executable, "-c", SAVES, str(folder)], stdout=subprocess.PIPE, env=environment
        )
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.3 * rng.random())
        finally:
            process.send_signal(signal.SIGKILL)
            complete, _ = process.communicate()
        last = max([1, *map(int, complete.split(b"\n")[:-1])])
        state, _, lines = restore(folder, like)
        assert lines == []
        assert last <= int(state.step) <= last + 1
        assert (np.asarray(state.params["w"]) == int(state.step)).all()
        assert all(path.name.isdigit() for path in folder.iterdir())

"""Parameters as a file for other tools: the same bits come back, or a line says why not."""

import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdp.checkpoints import export
from jaxdp.checkpoints.export import Form, check_importable, export_leaves, import_leaves
from jaxdp.errors import StorageError, UserError


@pytest.fixture
def leaves(rng):
    made = {
        "params/w": rng.normal(size=(5, 7)).astype(np.float32).T,  # not contiguous
        "params/scale": np.array(3, np.float32),
        "params/none": np.zeros((0, 4), np.float32),
        "params/half": rng.normal(size=3).astype(ml_dtypes.bfloat16),
        "model_state/mean": rng.normal(size=4).astype(np.float16),
        "model_state/count": rng.integers(0, 9, 4, np.int32),
    }
    made["params/w"][0, 0] = np.nan
    return made


def forms(leaves):
    return {name: Form(str(leaf.dtype), leaf.shape) for name, leaf in leaves.items()}


def test_there_and_back_to_the_bit(leaves, tmp_path):
    path = tmp_path / "a.safetensors"
    others = {"opt_state/mu": np.ones(3), "step": np.array(4)}
    assert export_leaves(path, leaves | others, {"step": "4"}) == len(leaves)
    assert list(tmp_path.iterdir()) == [path]
    found = import_leaves(path, forms(leaves))
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(found[name], leaf, strict=True)
    assert load_file(path).keys() == leaves.keys()  # for other tools: what their library reads


@pytest.mark.parametrize(
    ("name", "other", "line"),
    [
        ("params/w", np.ones((7, 6), np.float32), "is float32[7, 6] there and float32[7, 5] in"),
        ("params/w", np.ones((7, 5)), "is float64[7, 5] there and float32[7, 5] in"),
        ("params/w", None, "is absent there and float32[7, 5] in"),
        ("params/more", np.ones(2, np.int8), "is int8[2] there and absent in"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_cast(name, other, line, leaves, tmp_path):
    changed = {n: leaf for n, leaf in (leaves | {name: other}).items() if leaf is not None}
    save_file({n: np.array(x, order="C") for n, x in changed.items()}, tmp_path / "b")
    for read in (check_importable, import_leaves):
        with pytest.raises(UserError) as refused:
            read(tmp_path / "b", forms(leaves))
        assert refused.value.lines == (f"init_from: {tmp_path / 'b'}: {name} {line} this model",)


def test_of_many_that_do_not_fit_some_are_told(leaves, tmp_path):
    save_file({f"x{i}": np.ones(1) for i in range(50)}, tmp_path / "b")
    with pytest.raises(UserError) as refused:
        check_importable(tmp_path / "b", forms(leaves))
    assert len(refused.value.lines) == export._SHOWN
    assert refused.value.lines[-1].endswith(f"and {50 + len(leaves) - export._SHOWN + 1} more")


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "folder", "missing"])
def test_a_file_that_cannot_be_read_is_one_line(damage, leaves, tmp_path):
    path = tmp_path / "c"
    export_leaves(path, leaves, {})
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(
            {"empty": b"", "cut": content[:-1], "other": b"\x80\x04K\x01." * 9}[damage]
        )
    with pytest.raises(UserError) as refused:
        check_importable(path, forms(leaves))
    [line] = refused.value.lines
    assert line.startswith(f"init_from: {path}")
    assert len(line.splitlines()) == 1


def test_nothing_is_overwritten_and_no_half_is_left(leaves, tmp_path, monkeypatch):
    (tmp_path / "d").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        export_leaves(tmp_path / "d", leaves, {})
    with pytest.raises(UserError, match="no folder"):
        export_leaves(tmp_path / "e" / "f", leaves, {})

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(export.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        export_leaves(tmp_path / "g", leaves, {})
    assert [path.name for path in tmp_path.iterdir()] == ["d"]

"""The user's own arrays, in an .npz or in a folder of .npy files."""

import os
import pickle
from typing import Any

import numpy as np
import pytest

from jaxdp.data import load_dataset
from jaxdp.errors import UserError


def arrays(n=60, seed=0, dtype: Any = np.float32):
    rng = np.random.default_rng(seed)
    return (10 * rng.normal(size=(n, 3, 2))).astype(dtype), rng.integers(0, 5, n)


def write(place, inputs, label, form):
    """Writes the arrays; returns (what the user gives, the file of inputs, the file of labels)."""
    if form == "npz":
        np.savez(place / "data.npz", inputs=inputs, label=label)
        return (place / "data.npz",) * 3
    folder = place / "data"
    folder.mkdir(exist_ok=True)
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "label.npy", label)
    return folder, folder / "inputs.npy", folder / "label.npy"


@pytest.fixture(params=["npz", "folder"])
def form(request):
    return request.param


def refusal(**options):
    with pytest.raises(UserError) as caught:
        load_dataset("npz", **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def rows(batch):
    return {(x.tobytes(), int(y)) for x, y in zip(batch["inputs"], batch["label"], strict=True)}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int16, ">f4"])
def test_both_parts_together_are_what_was_written(tmp_path, form, dtype):
    inputs, label = arrays(dtype=dtype)
    data = load_dataset("npz", path=write(tmp_path, inputs, label, form)[0], heldout_fraction=0.2)
    assert (len(data.train), len(data.heldout)) == (48, 12)
    assert (data.shape, data.num_classes, data.task) == ((3, 2), 5, "classification")
    train, heldout = data.train[np.arange(48)], data.heldout[np.arange(12)]
    assert train["inputs"].dtype == np.float32
    assert train["label"].dtype == np.int32
    whole = rows({"inputs": inputs.astype(np.float32), "label": label})
    assert rows(train) | rows(heldout) == whole
    assert not rows(train) & rows(heldout)


def test_rows_are_those_asked_for(tmp_path, form):
    path = write(tmp_path, *arrays(), form)[0]
    data = load_dataset("npz", path=path)
    assert len(data.heldout) == 6
    every = data.train[np.arange(len(data.train))]
    wanted = np.random.default_rng(1).integers(0, len(data.train), 100)
    np.testing.assert_array_equal(data.train[wanted]["inputs"], every["inputs"][wanted])
    np.testing.assert_array_equal(data.train[wanted]["label"], every["label"][wanted])


def test_a_folder_is_memory_mapped(tmp_path):
    path, inputs_file, _ = write(tmp_path, *arrays(), "folder")
    data = load_dataset("npz", path=path)
    before = data.train[np.array([0])]["inputs"]
    inputs = np.load(inputs_file, mmap_mode="r+")
    inputs += 1
    inputs.flush()
    np.testing.assert_allclose(data.train[np.array([0])]["inputs"], before + 1, rtol=1e-5)


def test_heldout_of_its_own(tmp_path, form):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    inputs, label = arrays(20, seed=3)
    label[7] = 6
    path = write(first, *arrays(), form)[0]
    heldout_path = write(second, inputs, label, form)[0]
    data = load_dataset("npz", path=path, heldout_path=heldout_path)
    assert (len(data.train), len(data.heldout), data.num_classes) == (60, 20, 7)
    np.testing.assert_array_equal(data.heldout[np.arange(20)]["inputs"], inputs)
    assert data.facts["heldout_path"] == str(heldout_path)
    assert "record 7" in refusal(path=path, heldout_path=heldout_path, num_classes=5)
    assert "give one" in refusal(path=path, heldout_path=heldout_path, heldout_fraction=0.1)
    write(second, inputs[:, :2], label, form)
    assert "(2, 2)" in refusal(path=path, heldout_path=heldout_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_d7_a_value_that_is_not_finite_names_file_and_record(tmp_path, form, value):
    inputs, label = arrays(dtype=np.float64)
    inputs[41, 2, 1] = value
    path, inputs_file, _ = write(tmp_path, inputs, label, form)
    message = refusal(path=path)
    assert f"{inputs_file}: {value} in inputs at record 41, element [2, 1];" in message


def test_d7_the_record_is_right_beyond_the_first_chunk(tmp_path, monkeypatch, form):
    monkeypatch.setattr("jaxdp.data.arrays._CHUNK_BYTES", 100)
    inputs, label = arrays()
    assert load_dataset("npz", path=write(tmp_path, inputs, label, form)[0]).num_classes == 5
    inputs[53, 0, 0] = np.nan
    assert "record 53, element [0, 0]" in refusal(path=write(tmp_path, inputs, label, form)[0])


@pytest.mark.parametrize(("value", "options"), [(-1, {}), (5, {"num_classes": 5}), (2**30, {})])
def test_d7_label_out_of_range_names_file_and_record(tmp_path, form, value, options):
    inputs, label = arrays()
    label[33] = value
    path, _, label_file = write(tmp_path, inputs, label, form)
    assert f"{label_file}: label {value} at record 33;" in refusal(path=path, **options)


def test_d7_a_label_beyond_int32_is_not_wrapped(tmp_path, form):
    inputs, label = arrays()
    label[2] = 2**32 + 1
    path = write(tmp_path, inputs, label, form)[0]
    assert f"label {2**32 + 1} at record 2;" in refusal(path=path, num_classes=5)


def test_d7_wrong_dtypes_and_shapes(tmp_path, form):
    inputs, label = arrays()
    wrong = [
        (inputs, label.astype(float), "label has dtype float64"),
        (inputs, np.eye(5)[label].astype(int), "shape (60, 5)"),
        (inputs.astype(complex), label, "inputs have dtype complex128"),
        (inputs.astype(str), label, "inputs have dtype <U"),
        (inputs[:, 0, 0], label, "shape (60,)"),
        (inputs, label[:59], "60 inputs and 59 labels"),
        (inputs[:0], label[:0], "0 inputs and 0 labels"),
    ]
    for bad_inputs, bad_label, expected in wrong:
        message = refusal(path=write(tmp_path, bad_inputs, bad_label, form)[0])
        assert expected in message
        assert str(tmp_path) in message


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["inputs", "label"])
def test_pickled_arrays_are_refused_and_not_run(tmp_path, form, name):
    trap = Trap(tmp_path / "sprung")
    content = dict(zip(("inputs", "label"), arrays(), strict=True))
    content[name] = np.array([trap] * 60, dtype=object)
    path, *_ = write(tmp_path, content["inputs"], content["label"], form)
    assert "never pickled" in refusal(path=path)
    path = tmp_path / "pickle.npz"
    path.write_bytes(pickle.dumps(trap))
    assert "never pickled" in refusal(path=path)
    assert not trap.path.exists()


def test_damaged_files_are_one_line_that_names_them(tmp_path, form):
    """Random damage is refused in one line, or changes numbers that nothing can vouch for."""
    rng = np.random.default_rng(0)
    path, inputs_file, _ = write(tmp_path, *arrays(), form)
    original = inputs_file.read_bytes()
    refused = []
    for trial in range(150):
        content = bytearray(original)
        if trial % 3 == 0:
            content = content[: rng.integers(0, len(content))]
        else:
            for place in rng.integers(0, min(len(content), 160), 3):
                content[place] = rng.integers(0, 256)
        inputs_file.write_bytes(content)
        try:
            load_dataset("npz", path=path)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(len(line.splitlines()) == 1 and str(tmp_path) in line for line in refused)


def test_files_that_are_not_there_or_not_these(tmp_path):
    assert "no such file" in refusal(path=tmp_path / "nowhere.npz")
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty' / 'inputs.npy'}: no such file" in refusal(path=tmp_path / "empty")
    np.savez(tmp_path / "names.npz", images=np.zeros((3, 2)), label=np.arange(3))
    message = refusal(path=tmp_path / "names.npz")
    assert message.startswith(f"{tmp_path / 'names.npz'}: holds images, label; expected inputs and")
    np.save(tmp_path / "single.npy", np.zeros((3, 2)))
    assert "goes into a folder" in refusal(path=tmp_path / "single.npy")
    (tmp_path / "zero.npz").touch()
    assert "no zip archive" in refusal(path=tmp_path / "zero.npz")


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_heldout_fraction_out_of_range(tmp_path, fraction):
    path = write(tmp_path, *arrays(), "npz")[0]
    assert f"heldout_fraction is {fraction}" in refusal(path=path, heldout_fraction=fraction)


def test_at_least_one_example_on_each_side(tmp_path):
    path = write(tmp_path, *arrays(60), "npz")[0]
    assert len(load_dataset("npz", path=path, heldout_fraction=1e-6).heldout) == 1
    message = refusal(path=path, heldout_fraction=0.999)
    assert "60 of 60 records" in message
    assert "num_classes is 0" in refusal(path=path, num_classes=0)

"""Digits and Fashion-MNIST, whole and damaged."""

import gzip
import os
import struct

import numpy as np
import pytest

from jaxdp.data import load_dataset
from jaxdp.data.images import FASHION_MNIST_FOLDER
from jaxdp.errors import UserError

STEMS = {"train": 30, "t10k": 12}


def idx(values, kind=8):
    """The oracle: an IDX file written by hand."""
    dims = b"".join(struct.pack(">I", d) for d in values.shape)
    return bytes([0, 0, kind, values.ndim]) + dims + values.tobytes()


@pytest.fixture(params=["gz", "plain"])
def folder(request, tmp_path):
    """A small data set of 5x7 images in the four files; `.arrays` holds what was written."""
    rng = np.random.default_rng(0)
    arrays = {}
    for stem, n in STEMS.items():
        arrays[stem] = (
            rng.integers(0, 256, (n, 5, 7), dtype=np.uint8),
            rng.integers(0, 10, n, dtype=np.uint8),
        )
        for name, values in zip(("images-idx3", "labels-idx1"), arrays[stem], strict=True):
            path = tmp_path / f"{stem}-{name}-ubyte"
            if request.param == "gz":
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx(values)))
            else:
                path.write_bytes(idx(values))
    return tmp_path, arrays


def rewrite(folder, stem, change):
    """Applies `change` to the (decompressed) bytes of one file; returns its path."""
    (path,) = folder.glob(f"{stem}*")
    packed = path.suffix == ".gz"
    content = change(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


def refusal(**options):
    with pytest.raises(UserError) as caught:
        load_dataset("fashion_mnist", **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

    data = load_dataset("digits")
    images, label = load_digits(return_X_y=True)
    known = {(x.tobytes(), y) for x, y in zip(images.astype(np.uint8), label, strict=True)}
    seen = []
    for source, n in ((data.train, 1437), (data.heldout, 360)):
        assert len(source) == n
        batch = source[np.arange(n)]
        assert batch["inputs"].dtype == np.float32
        assert batch["inputs"].shape == (n, 8, 8, 1)
        assert batch["label"].dtype == np.int32
        pixels = np.rint((batch["inputs"] * 0.3760 + 0.3053) * 16).astype(np.uint8)
        seen += zip(pixels.reshape(n, 64), batch["label"].tolist(), strict=True)
    # As sets: 1,797 different images, so no image is in both parts.
    assert {(x.tobytes(), y) for x, y in seen} == known
    assert len(known) == 1797
    inputs = data.train[np.arange(1437)]["inputs"]
    assert abs(inputs.mean()) < 0.01
    assert abs(inputs.std() - 1) < 0.01


def test_digits_split_is_fixed_and_has_every_class():
    a, b = load_dataset("digits"), load_dataset("digits")
    every = np.arange(360)
    np.testing.assert_array_equal(a.heldout[every]["inputs"], b.heldout[every]["inputs"])
    assert np.bincount(a.heldout[every]["label"], minlength=10).min() > 20
    assert a.facts == b.facts
    assert (a.num_classes, a.shape, a.task) == (10, (8, 8, 1), "classification")


def test_a_folder_of_idx_files(folder):
    path, arrays = folder
    data = load_dataset("fashion_mnist", path=str(path))
    assert data.shape == (5, 7, 1)
    assert (data.facts["train"], data.facts["heldout"]) == (30, 12)
    for source, stem in ((data.train, "train"), (data.heldout, "t10k")):
        pixels, label = arrays[stem]
        indices = np.random.default_rng(1).integers(0, len(label), 50)
        batch = source[indices]
        expected = (pixels[indices].astype(np.float64)[..., None] / 255 - 0.2860) / 0.3530
        assert batch["inputs"].dtype == np.float32
        np.testing.assert_allclose(batch["inputs"], expected, rtol=1e-5, atol=1e-6)
        assert batch["label"].dtype == np.int32
        np.testing.assert_array_equal(batch["label"], label[indices])


def test_the_digest_is_of_the_contents(folder):
    path, _ = folder
    before = load_dataset("fashion_mnist", path=path).facts["sha256"]
    assert load_dataset("fashion_mnist", path=path).facts["sha256"] == before
    rewrite(path, "t10k-images", lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    assert load_dataset("fashion_mnist", path=path).facts["sha256"] != before


@pytest.mark.skipif(not os.path.isdir(FASHION_MNIST_FOLDER), reason="Debian's package is absent")
def test_fashion_mnist_of_debian():
    data = load_dataset("fashion_mnist")
    assert (len(data.train), len(data.heldout), data.shape) == (60000, 10000, (28, 28, 1))
    label = data.train[np.arange(0, 60000)]["label"]
    assert np.bincount(label).tolist() == [6000] * 10
    inputs = data.train[np.arange(0, 60000, 20)]["inputs"]
    assert abs(inputs.mean()) < 0.02
    assert abs(inputs.std() - 1) < 0.02


def test_a_missing_folder_says_what_to_do(tmp_path):
    message = refusal(path=tmp_path / "nowhere")
    assert "nowhere" in message
    assert "apt-get install dataset-fashion-mnist" in message
    assert "data.path" in message


def test_d7_truncated_values_name_the_record(folder):
    path = rewrite(folder[0], "train-images", lambda content: content[: 16 + 35 * 17 + 3])
    message = refusal(path=folder[0])
    assert str(path) in message
    assert "record 17" in message
    assert "30 records" in message


def test_d7_truncated_header_and_compressed_stream(folder):
    path = rewrite(folder[0], "t10k-labels", lambda content: content[:6])
    assert f"{path}: ends after 6 bytes" in refusal(path=folder[0])
    path.write_bytes(gzip.compress(os.urandom(500))[:300])
    if path.suffix == ".gz":
        assert f"{path}: cannot be read as an IDX file" in refusal(path=folder[0])


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_d7_wrong_magic(folder, place):
    def flip(content):
        return content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :]

    path = rewrite(folder[0], "train-labels", flip)
    message = refusal(path=folder[0])
    assert str(path) in message
    assert "0x00000801" in message


def test_d7_wrong_dtype(folder):
    floats = np.zeros((30, 5, 7), ">f4")
    path = rewrite(folder[0], "train-images", lambda _: idx(floats, kind=0x0D))
    message = refusal(path=folder[0])
    assert f"{path}: starts with 0x00000d03" in message
    assert "unsigned bytes" in message


@pytest.mark.parametrize("record", [0, 11, 29])
def test_d7_label_out_of_range_names_file_and_record(folder, record):
    place = 8 + record
    path = rewrite(
        folder[0], "train-labels", lambda c: c[:place] + bytes([10 + record]) + c[place + 1 :]
    )
    assert f"{path}: label {10 + record} at record {record};" in refusal(path=folder[0])


def test_counts_and_sizes_that_disagree(folder):
    rewrite(folder[0], "t10k-labels", lambda _: idx(np.zeros(11, np.uint8)))
    message = refusal(path=folder[0])
    assert "11 labels for the 12 images" in message
    rewrite(folder[0], "t10k-labels", lambda _: idx(np.zeros(12, np.uint8)))
    rewrite(folder[0], "t10k-images", lambda _: idx(np.zeros((12, 7, 7), np.uint8)))
    assert "(7, 7)" in refusal(path=folder[0])


def test_d6_no_records(folder):
    rewrite(folder[0], "train-images", lambda _: idx(np.zeros((0, 5, 7), np.uint8)))
    assert "0 records" in refusal(path=folder[0])


def test_a_folder_in_place_of_a_file(folder):
    (path,) = folder[0].glob("train-images*")
    path.unlink()
    path.mkdir()
    assert f"{path}: is a folder" in refusal(path=folder[0])

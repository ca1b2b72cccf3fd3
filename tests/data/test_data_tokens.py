"""Token files, raw and with a header, whole and damaged."""

import numpy as np
import pytest

from jaxdp.data import load_dataset
from jaxdp.data.tokens import read_tokens
from jaxdp.errors import UserError


def some_tokens(n=1000, high=300, seed=0):
    return np.random.default_rng(seed).integers(1, high, n).astype("<u2")


def header(count, magic=20240520, version=1):
    words = np.zeros(256, "<i4")
    words[:3] = magic, version, count
    return words.tobytes()


@pytest.fixture(params=["raw", "header"])
def start(request):
    """What stands before `n` tokens in a file of this form."""
    return header if request.param == "header" else lambda n: b""


def refusal(**options):
    with pytest.raises(UserError) as caught:
        load_dataset("tokens", **{"context": 8, **options})
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_tokens_are_those_written(tmp_path, start):
    tokens, path = some_tokens(), tmp_path / "a.bin"
    path.write_bytes(start(1000) + tokens.tobytes())
    np.testing.assert_array_equal(read_tokens(path), tokens)
    data = load_dataset("tokens", path=path, context=1, heldout_fraction=0.1)
    assert (data.facts["train_tokens"], data.facts["heldout_tokens"]) == (900, 100)
    np.testing.assert_array_equal(data.train[np.arange(899)]["tokens"][:, 0], tokens[:899])
    np.testing.assert_array_equal(data.heldout[np.arange(99)]["tokens"][:, 1], tokens[901:])
    assert (data.num_classes, data.shape, data.task) == (tokens.max() + 1, (1,), "language")
    assert data.bytes_per_token is None


def test_heldout_of_its_own(tmp_path, start):
    train, heldout = some_tokens(), some_tokens(100, high=500, seed=1)
    (tmp_path / "a.bin").write_bytes(start(1000) + train.tobytes())
    (tmp_path / "b.bin").write_bytes(start(100) + heldout.tobytes())
    paths = {"path": tmp_path / "a.bin", "heldout_path": tmp_path / "b.bin"}
    data = load_dataset("tokens", context=9, **paths)
    assert (len(data.train), len(data.heldout)) == (111, 11)
    np.testing.assert_array_equal(data.heldout[np.array([3])]["tokens"][0], heldout[27:37])
    assert data.num_classes == heldout.max() + 1
    place = np.flatnonzero(heldout >= 300)[0]
    message = refusal(vocab_size=300, **paths)
    assert f"b.bin: token {heldout[place]} at position {place};" in message
    assert "give one" in refusal(heldout_fraction=0.1, **paths)


@pytest.mark.parametrize("place", [0, 17, 999])
def test_d7_token_out_of_vocabulary_names_file_and_position(tmp_path, start, place, monkeypatch):
    monkeypatch.setattr("jaxdp.data.tokens._CHUNK", 10)
    tokens, path = some_tokens(), tmp_path / "a.bin"
    path.write_bytes(start(1000) + tokens.tobytes())
    assert load_dataset("tokens", path=path, context=8, vocab_size=400).num_classes == 400
    tokens[place] = 400
    path.write_bytes(start(1000) + tokens.tobytes())
    assert f"{path}: token 400 at position {place};" in refusal(path=path, vocab_size=400)


@pytest.mark.parametrize("size", [1024, 1026, 2000, 3022, 3026])
def test_d7_count_and_size_disagree(tmp_path, size):
    path = tmp_path / "a.bin"
    path.write_bytes((header(1000) + some_tokens(2000).tobytes())[:size])
    message = refusal(path=path)
    assert f"{path}: its header says 1000 tokens" in message
    assert f"{(size - 1024) / 2}" in message


def test_d7_truncated_within_a_token_or_the_header(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(some_tokens().tobytes()[:-1])
    assert f"{path}: 1999 bytes, an odd number" in refusal(path=path)
    path.write_bytes(header(1000)[:500])
    assert "header says 1000 tokens" in refusal(path=path)
    path.write_bytes(b"")
    assert "it is empty" in refusal(path=path)
    path.write_bytes(b"x")
    assert "1 bytes, an odd number" in refusal(path=path)


@pytest.mark.parametrize(("magic", "version"), [(20240521, 1), (20240520, 2), (20240801, 7)])
def test_d7_a_header_of_another_kind_is_not_read_as_tokens(tmp_path, magic, version):
    path = tmp_path / "a.bin"
    path.write_bytes(header(1000, magic, version) + some_tokens().tobytes())
    message = refusal(path=path)
    assert f"{path}: its header says kind {magic}, version {version}" in message
    assert "20240520" in message


@pytest.mark.parametrize("count", [-5, 0])
def test_d6_a_header_without_tokens(tmp_path, count):
    path = tmp_path / "a.bin"
    path.write_bytes(header(count))
    assert str(path) in refusal(path=path)


def test_d6_too_few_tokens_give_both_numbers(tmp_path, start):
    path = tmp_path / "a.bin"
    path.write_bytes(start(20) + some_tokens(20).tobytes())
    message = refusal(path=path, context=30)
    assert "19 tokens" in message
    assert "31" in message
    assert "vocab_size is 0" in refusal(path=path, vocab_size=0)


def test_files_that_cannot_be_read(tmp_path):
    assert "no such file" in refusal(path=tmp_path / "nowhere.bin")
    assert "is a folder" in refusal(path=tmp_path)


def test_a_numpy_file_is_not_taken_for_tokens(tmp_path, rng):
    np.save(tmp_path / "a.npy", rng.integers(0, 50, 5000).astype(np.uint16))
    np.savez(tmp_path / "a.npz", rng.integers(0, 50, 5000).astype(np.uint16))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(UserError, match="a NumPy file; expected raw uint16 tokens"):
            load_dataset("tokens", path=tmp_path / name, context=16)


def test_a_first_token_that_spells_pk_is_no_archive(tmp_path):
    tokens = some_tokens()
    tokens[0] = 0x4B50  # "PK" in little-endian
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    np.testing.assert_array_equal(read_tokens(tmp_path / "a.bin"), tokens)
    np.savez(tmp_path / "b.bin.npz", tokens)
    assert "a NumPy file" in refusal(path=tmp_path / "b.bin.npz")

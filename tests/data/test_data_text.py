"""Bytes as tokens: windows, the standard library, one file."""

import hashlib
import os
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxdp.data import load_dataset
from jaxdp.data import text as text_module
from jaxdp.data.windows import Windows
from jaxdp.errors import UserError


def refusal(kind, **options):
    with pytest.raises(UserError) as caught:
        load_dataset(kind, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("dtype", [np.uint8, np.dtype("<u2")])
@pytest.mark.parametrize(("n", "context"), [(2, 1), (9, 8), (16, 8), (17, 8), (18, 8), (1000, 7)])
def test_every_target_once(n, context, dtype):
    tokens = np.random.default_rng(n).integers(0, 256, n).astype(dtype)
    windows = Windows(tokens, context, Path("x"))
    assert len(windows) == (n - 1) // context
    examples = windows[np.arange(len(windows))]["tokens"]
    assert examples.dtype == np.int32
    assert examples.shape == (len(windows), context + 1)
    used = len(windows) * context
    np.testing.assert_array_equal(examples[:, :-1].reshape(-1), tokens[:used])
    np.testing.assert_array_equal(examples[:, 1:].reshape(-1), tokens[1 : used + 1])


def test_windows_in_any_order():
    tokens = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8)
    windows = Windows(tokens, 10, Path("x"))
    indices = np.random.default_rng(1).integers(0, len(windows), 64)
    expected = [tokens[10 * i : 10 * i + 11] for i in indices]
    np.testing.assert_array_equal(windows[indices]["tokens"], expected)


def test_d6_too_short_for_one_example_gives_both_numbers(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    message = refusal("text_file", path=tmp_path / "a.txt", context=20, heldout_fraction=0.2)
    assert "20 tokens" in message
    assert "needs 21" in message
    assert str(tmp_path / "a.txt") in message
    assert "context is 0" in refusal("text_file", path=tmp_path / "a.txt", context=0)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library of 300 files, among many that do not belong to the text."""
    contents = {}
    for i in range(300):
        path = ("" if i % 3 else "package/inner/") + f"module{i}.py"
        contents[path] = os.urandom(40).replace(b"\0", b"1")
    for path, content in contents.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    for path in (
        "site-packages/numpy.py",
        "dist-packages/apt.py",
        "test/test_os.py",
        "unittest/tests/test_case.py",
        "idlelib/run.py",
        "package/__pycache__/stale.py",
        "config-3.11-x86_64/python-config.py",
        "_sysconfigdata__linux.py",
        "LICENSE.txt",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"MUST NOT BE READ")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path, contents


def documents(source):
    tokens = source[np.arange(len(source))]["tokens"]
    return bytes(tokens[:, :-1].reshape(-1).astype(np.uint8)).split(b"\0")


def test_the_library_is_split_by_file_and_read_in_order(library):
    _, contents = library
    data = load_dataset("stdlib_text", context=1)  # drops at most the last byte of each part
    train, heldout = documents(data.train), documents(data.heldout)
    in_order = [contents[path] for path in sorted(contents)]
    for part in (train, heldout):
        places = [in_order.index(d) for d in part[:-1]]
        assert places == sorted(places)
    assert len(train) + len(heldout) == 300
    assert set(train[:-1] + heldout[:-1]) < set(in_order)
    assert 3 <= len(heldout) <= 35  # 5 % of 300, within 5 standard deviations
    assert data.facts["train_files"] == len(train)
    assert data.facts["heldout_files"] == len(heldout)


def test_a_new_file_moves_no_other_between_the_parts(library):
    folder, _ = library
    before = documents(load_dataset("stdlib_text", context=1).heldout)
    digest = load_dataset("stdlib_text", context=1).facts["sha256"]
    (folder / "aaa.py").write_bytes(b"new")
    data = load_dataset("stdlib_text", context=1)
    assert set(before[:-1]) <= set(documents(data.heldout))
    assert data.facts["sha256"] != digest


def test_the_library_of_this_python():
    data = load_dataset("stdlib_text", context=64)
    assert (data.num_classes, data.shape, data.task) == (256, (64,), "language")
    assert data.bytes_per_token == 1
    assert int(data.facts["train_bytes"]) > 5_000_000
    share = int(data.facts["heldout_files"]) / int(data.facts["train_files"])
    assert 0.01 < share < 0.12
    text = documents(data.train)
    assert (Path(sysconfig.get_paths()["stdlib"]) / "abc.py").read_bytes() in text
    assert load_dataset("stdlib_text", context=64).facts == data.facts


def test_a_python_without_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    message = refusal("stdlib_text")
    assert "0 source files" in message
    assert "text_file" in message


def test_the_end_of_a_file_is_held_out(tmp_path):
    content = os.urandom(1001)
    path = tmp_path / "book.txt"
    path.write_bytes(content)
    data = load_dataset("text_file", path=path, context=1, heldout_fraction=0.25)
    assert (data.facts["train_bytes"], data.facts["heldout_bytes"]) == (751, 250)
    train = data.train[np.arange(len(data.train))]["tokens"]
    heldout = data.heldout[np.arange(len(data.heldout))]["tokens"]
    assert bytes(train[:, 0].astype(np.uint8)) + content[750:751] == content[:751]
    assert bytes(heldout[:, 0].astype(np.uint8)) + content[-1:] == content[751:]
    assert data.bytes_per_token == 1


def test_files_that_cannot_be_read(tmp_path):
    assert "no such file" in refusal("text_file", path=tmp_path / "nowhere")
    assert "is a folder" in refusal("text_file", path=tmp_path)
    assert "null byte" in refusal("text_file", path="a\0b")
    (tmp_path / "empty").touch()
    assert "0 records" in refusal("text_file", path=tmp_path / "empty")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_of_somebody_else(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    (tmp_path / "a.txt").chmod(0)
    assert "not readable" in refusal("text_file", path=tmp_path / "a.txt")


def test_permission_denied_is_one_line(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(text_module.Path, "read_bytes", denied)
    assert f"{tmp_path / 'a.txt'}: not readable" in refusal("text_file", path=tmp_path / "a.txt")


def test_a_pipe_is_read_once(tmp_path):
    text = bytes(range(256)) * 4
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(text,), daemon=True)
    writer.start()
    data = load_dataset("text_file", path=tmp_path / "pipe", context=8)
    writer.join(10)
    assert data.facts["sha256"] == hashlib.sha256(text).hexdigest()

"""The manifest and the digests of files: what is read is what was written, or damage."""

import json
import os
from contextlib import suppress

import numpy as np
import pytest

from jaxdp.checkpoints import files, manifest
from jaxdp.checkpoints.files import DamageError, FileEntry
from jaxdp.checkpoints.manifest import LeafEntry, Manifest
from jaxdp.errors import StorageError


@pytest.fixture
def step(tmp_path, rng):
    """The folder of a step with three files, and its manifest."""
    folder = tmp_path / "8"
    (folder / "state" / "d").mkdir(parents=True)
    for name in ("state/d/a", "state/d/b", "state/_METADATA"):
        (folder / name).write_bytes(rng.bytes(int(rng.integers(1, 9000))))
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    leaves = {"params/w": LeafEntry("float32", (2, 3), "0123456789abcdef"),
              "step": LeafEntry("int32", (), "0" * 16)}  # fmt: skip
    held = Manifest(
        8, leaves, files.entries(folder, manifest.payload(folder)), {"devices": 4}, {"x": 1}
    )
    manifest.write(folder, held)
    return folder, held


def test_what_is_read_is_what_was_written(step):
    folder, held = step
    assert manifest.read(folder) == held
    assert set(held.files) == {"state/d/a", "state/d/b", "state/_METADATA"}  # Orbax's mark is not
    files.check(folder, held.files)
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


def test_any_bit_of_the_manifest_counts(step, rng):
    folder, held = step
    path = folder / manifest.NAME
    content = path.read_bytes()
    for bit in rng.choice(8 * len(content), 200, replace=False):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << int(bit % 8)
        path.write_bytes(changed)
        with suppress(DamageError):
            assert manifest.read(folder) == held  # white space alone was changed


@pytest.mark.parametrize("length", [0, 1, 4095, 1 << 22, (1 << 22) + 1])
def test_digest_of_a_file_is_that_of_its_bytes(length, rng, tmp_path):
    content = rng.bytes(length)
    (tmp_path / "f").write_bytes(content)
    assert files.digest_of_file(tmp_path / "f") == files.digest_of(content)
    assert files.digest_of(content) != files.digest_of(content + b"\0")


def in_place_of(path):
    path.unlink()
    return path


DAMAGES = {
    "has another content": lambda f: f.write_bytes(f.read_bytes()[:-1] + b"#"),
    "bytes instead of": lambda f: f.write_bytes(f.read_bytes() + b"x"),
    "is missing": lambda f: f.unlink(),
    "is a folder": lambda f: in_place_of(f).mkdir(),
    "is a symbolic link": lambda f: in_place_of(f).symlink_to(f.with_name("b")),
    "is missing ": lambda f: os.mkfifo(in_place_of(f)),  # and is not waited for
    "is behind a symbolic link": lambda f: (
        f.parent.rename(f.parent.with_name("e")) and f.parent.symlink_to(f.parent.with_name("e"))
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_file_that_is_another_is_named(words, step):
    folder, held = step
    path = folder / "state" / "d" / "a"
    path.write_bytes(b"0" * len(path.read_bytes()))
    held.files["state/d/a"] = FileEntry(path.stat().st_size, files.digest_of_file(path))
    DAMAGES[words](path)
    with pytest.raises(DamageError, match=rf"state/d/[ab] .*{words.strip()}"):
        files.check(folder, held.files)


def test_sizes_alone_do_not_see_another_content(step):
    folder, held = step
    path = folder / "state" / "d" / "a"
    path.write_bytes(bytes(len(path.read_bytes())))
    files.check(folder, held.files, digests=False)
    with pytest.raises(DamageError, match="another content"):
        files.check(folder, held.files)


def test_a_file_or_folder_that_cannot_be_read(step, monkeypatch):
    folder, held = step

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "digest_of_file", refused)
    with pytest.raises(DamageError, match="cannot be read: Permission denied"):
        files.check(folder, held.files)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DamageError, match="cannot be listed: Permission denied"):
        files.check(folder, held.files)


def sealed(body):
    return json.dumps(body | {"seal": manifest._seal(body)}).encode()


CONTENTS = {
    "no JSON": b"{", "no JSON ": b"\xff{}", "no JSON  ": b"[" * 10**6, "no object": b"[]",
    "its content does not fit its seal": b'{"step": 8}',
    "is damaged": sealed({"schema": 1, "hash": files.HASH, "step": 8}),
    "is that of step 7": sealed({"schema": 1, "hash": files.HASH, "step": 7, "leaves": {},
                                 "files": {}, "facts": {}, "run": {}}),
}  # fmt: skip


@pytest.mark.parametrize("words", CONTENTS)
def test_a_manifest_that_is_none(words, step):
    folder, _ = step
    (folder / manifest.NAME).write_bytes(CONTENTS[words])
    with pytest.raises(DamageError, match=words.strip()):
        manifest.read(folder)


def test_a_huge_manifest_is_not_read(step):
    folder, _ = step
    with open(folder / manifest.NAME, "wb") as file:
        file.truncate(1 << 40)  # a hole: takes no space
    with pytest.raises(DamageError, match="has 1099511627776 bytes"):
        manifest.read(folder)


def test_what_is_no_folder_of_a_step(step, tmp_path):
    folder, _ = step
    (tmp_path / "9").symlink_to(folder)
    (tmp_path / "10").write_text("")
    (tmp_path / "11").mkdir()
    wrong = {"9": "symbolic link", "10": "is a file", "11": "no manifest.json", "12": "missing"}
    for name, words in wrong.items():
        with pytest.raises(DamageError, match=words):
            manifest.read(tmp_path / name)
        assert not manifest.is_there(tmp_path / name)
    (folder / manifest.NAME).rename(tmp_path / "m")
    (folder / manifest.NAME).symlink_to(tmp_path / "m")
    with pytest.raises(DamageError, match="symbolic link"):
        manifest.read(folder)


def test_a_later_version_is_not_taken_for_damage(step):
    folder, _ = step
    (folder / manifest.NAME).write_bytes(sealed({"schema": 2, "hash": files.HASH, "step": 8}))
    with pytest.raises(StorageError, match=r"schema 2 .* reads schema 1 .*the version that wrote"):
        manifest.read(folder)


def test_numbers_of_types_that_json_has_not_are_kept(step):
    folder, held = step
    again = Manifest(8, held.leaves, held.files, {}, {"metric": float("nan"), "best": np.inf})
    manifest.write(folder, again)
    assert str(manifest.read(folder).run) == "{'metric': nan, 'best': inf}"

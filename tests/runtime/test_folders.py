"""Where the attempts of a job write, and what becomes of a folder that cannot be made."""

import tempfile
from pathlib import Path

import pytest

from jaxdp.errors import UserError
from jaxdp.runtime.folders import attempt_folders, next_folder


class Notes(list):
    """A janitor that only keeps what it is told, and what a launcher says."""

    def note(self, kind, value):
        self.append((kind, value))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_temporary_folders_are_removed_at_the_end(temporary):
    notes = Notes()
    with attempt_folders(None, notes, notes.append) as folders:
        made = [folders.of_attempt(attempt) for attempt in range(2)]
        assert {path.parent for path, _ in made} == {temporary}
        assert not any(kept for _, kept in made)
        assert notes == [("folder", path) for path, _ in made]
    assert not list(temporary.iterdir())


def test_launchers_that_share_a_folder_take_different_numbers(tmp_path, monkeypatch):
    """The others made theirs after this one had looked."""
    for number in range(2):
        (tmp_path / f"attempt-{number}").mkdir()
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    assert [next_folder(tmp_path).name for _ in range(2)] == ["attempt-2", "attempt-3"]


def test_a_folder_that_cannot_be_used_is_a_mistake_at_the_start_alone(tmp_path, temporary):
    notes = Notes()
    logs = tmp_path / "logs"
    with attempt_folders(str(logs), notes, notes.append) as folders:
        assert folders.of_attempt(0) == (logs / "attempt-0", True)
        (logs / "attempt-0").rmdir()
        logs.rmdir()
        logs.write_text("")  # as good as a full disk
        folder, kept = folders.of_attempt(1)
        assert (folder.parent, kept) == (temporary, False)
        told = f"--log-dir: {logs} cannot be used: File exists"
        assert notes == [f"launch: {told}; nothing is kept of this attempt", ("folder", folder)]
        with pytest.raises(UserError, match=told):
            folders.of_attempt(0)
    assert not list(temporary.iterdir())


def test_no_temporary_folder_at_all_is_one_line(monkeypatch):
    def refuse():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: tempfile.gettempdir())
    for given, named in (("/no/such", "/no/such"), ("", "/tmp")):
        monkeypatch.setenv("TMPDIR", given)
        with (
            attempt_folders(None, Notes(), print) as folders,
            pytest.raises(UserError, match=f"^{named}: no temporary .*; set TMPDIR, or give --log"),
        ):
            folders.of_attempt(0)

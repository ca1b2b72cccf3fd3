"""`python -m jaxdp.checkpoint`: what it says of checkpoints, its codes, its one-line mistakes."""

import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxdp.checkpoint import main
from jaxdp.checkpoints import Checkpoints, manifest


@pytest.fixture
def program(monkeypatch, capsys):
    """(words of the command) -> exit code, lines of stdout, lines of stderr."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # what the program would set

    def run(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(step):
    return max((step / "state").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)


def test_list_and_verify_name_what_is_damaged(saved, program, tmp_path):
    code, [head, *rows], _ = program("list", tmp_path / "c")
    assert code == 0
    assert head.split() == ["step", "size", "age", "devices", "state"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    size = sum(f.bytes for f in manifest.read(tmp_path / "c" / "1").files.values())
    assert f"{size / 1000:.1f} kB" in rows[0]
    assert program("verify", tmp_path / "c")[0] == 0
    bad = largest(tmp_path / "c" / "2")
    flip(bad)
    (tmp_path / "c" / "1" / manifest.NAME).write_text("{")
    (tmp_path / "c" / "3" / "x.pkl").write_text("")
    code, lines, [told] = program("verify", tmp_path / "c")
    assert code == 3
    name = bad.relative_to(tmp_path / "c" / "2").as_posix()
    assert lines[0] == "step 1: damaged: manifest.json is damaged: it is no JSON"
    assert lines[1] == f"step 2: damaged: {name} has another content than was written"
    assert lines[2].startswith("step 3: verified, ")
    assert lines[2].endswith("; added since: x.pkl")
    assert told.startswith("2 steps of 3 damaged")
    assert program("verify", tmp_path / "c", 3, "--thorough")[0] == 0
    code, [_, one, two, _], _ = program("list", tmp_path / "c")
    assert code == 0
    assert "damaged: manifest.json" in one
    assert "files of the right sizes" in two  # only verify reads them


def test_thorough_sees_values_that_are_not_those_saved(saved, program, tmp_path):
    before, newest = (manifest.read(tmp_path / "c" / name) for name in "23")
    wrong = dict(newest.leaves) | {"params/w": before.leaves["params/w"]}
    manifest.write(tmp_path / "c" / "3", manifest.Manifest(3, wrong, newest.files))
    assert program("verify", tmp_path / "c", "newest")[0] == 0
    code, [line], _ = program("verify", tmp_path / "c", "newest", "--thorough")
    assert code == 3
    assert line == "step 3: damaged: params/w came back with other values than were saved"


def test_a_step_of_a_later_version_hides_no_other(saved, program, tmp_path, monkeypatch):
    held = manifest.read(tmp_path / "c" / "1")
    with monkeypatch.context() as later:
        later.setattr(manifest, "SCHEMA", manifest.SCHEMA + 1)
        manifest.write(tmp_path / "c" / "1", held)
    code, lines, _ = program("verify", tmp_path / "c")
    assert code == 5
    assert lines[0].startswith("step 1: not verified: ")
    assert lines[0].endswith("use the version that wrote it")
    assert [line.split(",")[0] for line in lines[1:]] == ["step 2: verified", "step 3: verified"]
    assert program("list", tmp_path / "c")[0] == 0


def test_a_step_that_a_run_deletes_meanwhile_is_not_damaged(saved, program, tmp_path, monkeypatch):
    real = manifest.read

    def deleted(folder):
        if folder.name == "1":
            shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(manifest, "read", deleted)
    code, [first, *_], _ = program("verify", tmp_path / "c")
    assert (code, first) == (0, "step 1: deleted meanwhile")


def test_rotten_values_are_not_shown(saved, program, tmp_path):
    flip(largest(tmp_path / "c" / "2"))
    for words in (["show", tmp_path / "c", 2, "--norms"], ["diff", tmp_path / "c", 2, 2],
                  ["diff", tmp_path / "c", 2, 3]):  # fmt: skip
        code, out, [line] = program(*words)
        assert (code, out) == (5, []), words
        assert line.startswith("checkpoint 2 is damaged: ")


def test_adopt_writes_through_no_symbolic_link(saved, program, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "2").symlink_to(tmp_path / "c" / "2")
    before = (tmp_path / "c" / "2" / manifest.NAME).read_bytes()
    for words in (["adopt", tmp_path / "d"], ["adopt", tmp_path / "d", 2]):
        assert program(*words)[0] == 2, words
    assert (tmp_path / "c" / "2" / manifest.NAME).read_bytes() == before


def test_a_folder_that_cannot_be_entered_is_one_line(saved, program, tmp_path):
    code, _, [line] = program("list", tmp_path / ("n" * 300))
    assert code == 5
    assert line.endswith(": File name too long")


def test_show(saved, program, tmp_path):
    code, lines, _ = program("show", tmp_path / "c", 2, "--norms")
    assert code == 0
    assert lines[0].startswith("step 2, saved at 20")
    assert lines[0].endswith("on 1 device of 1 process")
    norm = np.linalg.norm(saved[2].params["w"].astype(np.float64))
    [line] = [line for line in lines if line.startswith("params/w")]
    assert line.split() == ["params/w", "float32[5,", "7]", "35", "elements", "norm", f"{norm:.6g}"]
    flip(tmp_path / "c" / "2" / manifest.NAME)
    code, _, [line] = program("show", tmp_path / "c", 2)
    assert code == 5
    assert line.startswith("checkpoint 2 is damaged: manifest.json")


def test_diff_of_steps_and_of_runs(saved, state_of, program, tmp_path):
    moved = jax.tree.map(lambda x: x, state_of(3))._replace(params=dict(saved[3].params))
    moved.params["w"] = saved[3].params["w"] + np.float32(0.5) * (np.arange(7) == 2)
    moved.params["more"] = np.zeros(2)
    with Checkpoints(tmp_path / "other" / "checkpoints") as checkpoints:
        checkpoints.save(3, moved._replace(opt_state=saved[3].opt_state))
    code, lines, _ = program("diff", tmp_path / "c", 3, 3)
    assert (code, lines) == (0, ["7 leaves, all the same to the bit"])
    code, lines, _ = program("diff", tmp_path / "c", "newest", 3, "--with", tmp_path / "other")
    assert code == 3
    assert lines[0].startswith("params/w: 5 of 35 elements, by 0.5 at most, ")
    share = np.sqrt(5 * 0.25) / np.linalg.norm(saved[3].params["w"])
    assert float(lines[0].split(", ")[2].split()[0]) == pytest.approx(share, rel=0.01)
    assert lines[1:] == ["params/more: absent and float64[2]", "2 of 8 leaves differ"]


def test_mistakes_are_one_line(saved, program, tmp_path):
    (tmp_path / "empty").mkdir()
    mistakes = {
        ("lst", "x"): "invalid choice: 'lst'",
        (): "required: COMMAND",
        ("list",): "required: RUN",
        ("list", tmp_path / "nix"): "there is no such folder",
        ("verify", tmp_path / "empty"): "no checkpoints there",
        ("verify", tmp_path / "c", "4"): "expected newest, or one of 1, 2, 3",
        ("show", tmp_path / "c", "-1"): "-1: no such step",
        ("diff", tmp_path / "c", "1"): "required: STEP",
        ("diff", tmp_path / "c", "1", "²"): "²: no such step",
        ("adopt", tmp_path / "c"): "every step has a manifest",
        ("list", tmp_path / "c", "--thorough"): "unrecognized arguments: --thorough",
    }
    for words, said in mistakes.items():
        code, out, [line] = program(*words)
        assert (code, out) == (2, []), words
        assert said in line


def test_help_names_codes_and_no_jax_is_imported_to_verify(saved, tmp_path):
    code = (
        "import sys; from jaxdp.checkpoint import main; assert main(['verify', sys.argv[1]]) == 0; "
        "assert main(['diff', sys.argv[1], '2', '2']) == 0; assert main(['--help']) == 0; "
        "sys.exit('jax' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "3 something is damaged" in ran.stdout

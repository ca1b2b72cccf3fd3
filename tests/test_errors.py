"""Every way in which a program may end is a code and one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdp.errors import Exit, StorageError, UserError, ending_of, exit_code

# Ctrl-C at the first line of a module that the program imports
INTERRUPTED = """
import importlib, os, signal, sys

class Finder:
    def find_spec(name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

_, module, program, *rest = sys.argv
sys.meta_path.insert(0, Finder)
sys.exit(importlib.import_module(program).main(rest))
"""


def python(*argv, **options):
    return subprocess.run(
        [sys.executable, *argv], text=True, check=False, stderr=subprocess.PIPE, timeout=120,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("pydantic", ["jaxdp.train", "--steps", "1"]),
        ("jax", ["jaxdp.train", "--steps", "1"]),
        ("orbax.checkpoint", ["jaxdp.train", "--steps", "1"]),
        ("jax", ["jaxdp.check"]),
        ("jax", ["jaxdp.compare"]),
    ],
)
def test_interrupted_while_it_starts_is_one_line(module, argv, tmp_path):
    root = str(Path(__file__).parent.parent)
    here = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": root}}
    ended = python("-c", INTERRUPTED, module, *argv, **here)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("program", ["train", "check", "compare"])
def test_help_that_cannot_be_written_is_one_line(program):
    with open("/dev/full", "w") as full:
        ended = python("-m", f"jaxdp.{program}", "--help", stdout=full)
    assert ended.returncode == Exit.STORAGE
    assert ended.stderr == "output: cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("what was wrong"), Exit.USER),
        (StorageError("what was wrong"), Exit.STORAGE),
        (SystemExit(0), Exit.DONE),
        (SystemExit(3), 3),
    ],
)
def test_the_code_of_an_error(error, code, capsys):
    def program():
        raise error

    assert exit_code(program) == code
    assert capsys.readouterr().err in ("what was wrong\n", "")


def test_a_package_that_is_not_installed_is_one_line():
    with pytest.raises(ModuleNotFoundError) as missing:
        import no_such_package.part  # noqa: F401
    ending = ending_of(missing.value)
    assert ending.code == Exit.USER
    assert ending.text.startswith("no_such_package is not installed; pip install -e .")
    assert "\n" not in ending.text


@pytest.mark.parametrize("name", ["jaxdp", "jaxdp.no_such", "numpy.no_such", "zlib", None])
def test_a_module_that_ought_to_be_there_is_a_bug(name):
    ending = ending_of(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert ending.code == Exit.BUG
    assert "please report it" in ending.text


def test_only_a_bug_shows_a_traceback(capsys):
    assert exit_code(lambda: [][1]) == Exit.BUG
    assert "please report it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nmore"),
            "(Out of mem",
        ),
        (MemoryError("Unable to allocate 8 GiB"), "(Unable to allocate 8 GiB)"),
        (MemoryError(), ""),
    ],
)
def test_out_of_memory_is_one_line_that_is_not_tried_again(error, words):
    ending = ending_of(error)
    assert ending.code == Exit.USER
    assert ending.text.startswith(f"out of memory {words}".rstrip())
    assert ending.text.endswith("a smaller batch or model, more microbatches, or more devices")
    assert "\n" not in ending.text


def test_more_memory_than_there_is(tmp_path):
    argv = ["-m", "jaxdp.train", "--out", str(tmp_path / "a"), "--model.hidden", "[2000000000000]"]
    ended = python(*argv, cwd=Path(__file__).parent.parent, stdout=subprocess.DEVNULL)
    assert ended.returncode == Exit.USER
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("out of memory (")


def test_letters_that_a_terminal_lacks_are_shown_some_other_way(tmp_path):
    argv = ["-m", "jaxdp.train", "--out", str(tmp_path / "é日"), "--steps", "2", "--devices", "1"]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    short = ["--optimizer.schedule", "constant", "--log.progress", "plain"]
    root = Path(__file__).parent.parent
    ended = python(*argv, *short, cwd=root, env=environ, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\\u65e5" in ended.stdout

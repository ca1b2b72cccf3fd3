"""YAML 1.2 into flat entries with their lines."""

import math
from pathlib import Path

import pytest

from jaxdp.config.read import read_file, read_value
from jaxdp.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e-4", 1e-4),
        ("1E4", 1e4),
        (".5", 0.5),
        ("1.", 1.0),
        ("-1", -1),
        ("+1", 1),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("true", True),
        ("TRUE", True),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("null", None),
        ("", None),
        (".inf", math.inf),
        ("nan", "nan"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'3'", "3"),
        ("[256, 1e-3]", [256, 1e-3]),
        ("{a: 1, [2]: 3}", {"a": 1, "[...]": 3}),
        ("@x", "@x"),
        ("a: b: c", "a: b: c"),
        ("!!int 3", "!!int 3"),
        ("*a", "*a"),
        ("[1, 2", "[1, 2"),
        ("1,000", "1,000"),
        ("9" * 5000, "9" * 5000),
        ("[" * 600, "[" * 600),
    ],
)
def test_read_value(text, value):
    found = read_value("steps", text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["2024", "3e-4", "true", "a # b", "[x]", "a: b", "", " x", "*a"])
def test_keys_that_take_text_take_it_as_it_is(text):
    assert read_value("out", text) == text
    assert read_value("data.path", text) == text


def test_null_is_no_text():
    assert read_value("out", "null") is read_value("out", "~") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("256,128", [256, 128]), ("256,", [256]), ("[256]", [256]), ("256", 256), ("[]", [])],
)
def test_lists(text, value):
    assert read_value("model.hidden", text) == value


def write(folder: Path, text: str | bytes) -> str:
    file = folder / "x.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def test_entries_know_their_line(tmp_path):
    file = write(tmp_path, "# a\nsteps: 3\n\nmodel:\n  hidden: [1,\n    2]\nlog: {every: 1}\n")
    entries, mistakes = read_file(file)
    assert {path: entry.value for path, entry in entries.items()} == {
        "steps": 3,
        "model.hidden": [1, 2],
        "log.every": 1,
    }
    assert [entry.label for entry in entries.values()] == [
        f"{file}:2: steps",
        f"{file}:5: model.hidden",
        f"{file}:7: log.every",
    ]
    assert mistakes == []


@pytest.mark.parametrize(
    ("text", "value"),
    [("out: 2024", "2024"), ("out: 010", "010"), ("out: true", "true"), ("out: ~", None),
     ("out: 'null'", "null"), ("out:", None), ("out: 2024-01-01", "2024-01-01"),
     ("\ufeffout: ü", "ü")],
)  # fmt: skip
def test_text_in_files(tmp_path, text, value):
    assert read_file(write(tmp_path, text)).entries["out"].value == value


def test_dotted_names_are_read_in_files_too(tmp_path):
    assert read_file(write(tmp_path, "log.every: 3")).entries["log.every"].value == 3


def test_keys_given_twice(tmp_path):
    text = "steps: 1\nmodel:\n  kind: mlp\n  kind: cnn\nsteps: 2\nmodel: 3\nmodel.kind: gpt\n"
    file = write(tmp_path, text)
    entries, mistakes = read_file(file)
    assert mistakes == [
        f"{file}:4: model.kind: given twice, first in line 3",
        f"{file}:5: steps: given twice, first in line 1",
        f"{file}:6: model: given twice, first in line 2",
        f"{file}:7: model.kind: given twice, first in line 3",
    ]
    assert entries["steps"].value == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ": empty; expected keys such as steps: 1000"),
        ("# only this\n", ": empty; expected keys such as steps: 1000"),
        ("- 1\n", ": not keys with values; expected lines such as steps: 1000"),
        ("hello", ": not keys with values; expected lines such as steps: 1000"),
        (bytes(range(256)), ": not a text file in UTF-8; expected YAML"),
        (b"steps: \0", ": not a text file; expected YAML"),
        ("steps: 3\nmodel: a: b", ":2: not readable: mapping values are not allowed here"),
        (
            "steps: [1, 2\nseed: 3",
            ":2: not readable: while parsing a flow sequence, expected ',' or ']', but got ':'",
        ),
        (
            "steps: 3\n---\nsteps: 4\n",
            ":2: not readable: expected a single document in the stream, "
            "but found another document",
        ),
        (
            "model: &a\n  kind: mlp\ndata: *a\n",
            ":3: not readable: aliases are not supported; write a plain value",
        ),
        (
            "\nsteps: !!int x\n",
            ":2: not readable: tags are not supported; write a plain value",
        ),
        ("steps: " + "[" * 600 + "]" * 600, ": nested too deeply; expected keys and sections"),
    ],
)
def test_unreadable_files_are_one_line(tmp_path, text, line):
    file = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_file(file)
    assert caught.value.lines == (file + line,)


def test_files_that_are_not_there(tmp_path):
    file = write(tmp_path, "steps: 3")
    for path, line in [
        (
            f"{tmp_path}/no.yaml",
            "no such file; expected a YAML file such as configs/digits_mlp.yaml",
        ),
        (str(tmp_path), "a folder; expected a YAML file"),
        (f"{file}/x", "cannot be read: Not a directory"),
        ("a\0b", "cannot be read: embedded null byte"),
    ]:
        with pytest.raises(UserError) as caught:
            read_file(path)
        assert caught.value.lines == (f"{path}: {line}",)

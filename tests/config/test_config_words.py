"""Values, types and suggestions in words."""

import pytest

from jaxdp.config.keys import KEYS
from jaxdp.config.words import either, expected, show, unknown_key


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-8, "1e-08"),
        ("a b", "'a b'"),
        ([512, "x", None], "[512, 'x', null]"),
        ({"a": [True]}, "{a: [true]}"),
        ("x" * 100, "'" + "x" * 56 + "..."),
    ],
)
def test_show(value, text):
    assert show(value) == text


def test_either():
    assert either(["a"]) == "a"
    assert either(["a", "b"]) == "a or b"
    assert either(["a", "b", "c"], "and") == "a, b and c"


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("steps", "", "a whole number of at least 1 and at most 999999999"),
        ("seed", "", "a whole number of at least 0 and at most 4294967295"),
        ("devices", "", "auto or a whole number of at least 1"),
        ("resume", "", "true, false or auto"),
        ("out", "", "non-empty text or null"),
        ("model.hidden", "mlp", "a list of whole numbers of at least 1"),
        ("model.channels", "cnn", "a non-empty list of whole numbers of at least 1"),
        ("model.dropout", "gpt", "a number of at least 0 and below 1"),
        ("data.heldout_fraction", "npz", "a number above 0 and below 1"),
        ("optimizer.end_fraction", "sgd", "a number of at least 0 and at most 1"),
        ("optimizer.clip_norm", "sgd", "a number above 0 or null"),
        ("eval.batch", "", "a whole number of at least 1 or null"),
        ("log.tensorboard", "", "true or false"),
    ],
)
def test_expected(path, kind, text):
    assert expected(KEYS[path][kind]) == text


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("lerning_rate", "optimizer.learning_rate"),
        ("model.learning_rate", "optimizer.learning_rate"),
        ("optim.learning_rate", "optimizer.learning_rate"),
        ("optimiser.lerning_rate", "optimizer.learning_rate"),
        ("optimizer.learning-rate", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("optimizer.steps", "steps"),
        ("log.evry", "log.every"),
        ("every", "checkpoint.every, eval.every, log.every or guard.every"),
        ("global-batch", "global_batch"),
        ("GLOBAL_BATCH", "global_batch"),
        ("batch_size", "global_batch"),
        ("modle", "model"),
        ("model.hiden", "model.hidden"),
        ("model.hidden.0", "model.hidden"),
        ("print-config", "print_config"),
        ("Model", "model"),
    ],
)
def test_suggestion(path, meant):
    assert unknown_key(path) == f"no such key; did you mean {meant}?"


@pytest.mark.parametrize("path", ["xyz", "model.foo", "", "a.b.c", "''"])
def test_no_suggestion_where_nothing_is_near(path):
    assert unknown_key(path) == "no such key"

"""Kinds by name, and what importing the package costs."""

import subprocess
import sys

import pytest

from jaxdp.data import DATASETS, load_dataset
from jaxdp.errors import UserError


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("digit", {}, "did you mean digits?"),
        ("imagenet", {}, "expected one of digits, fashion_mnist,"),
        ("digits", {"path": "x"}, "its options are: none"),
        ("text_file", {}, "'path'"),
        ("stdlib_text", {"contxt": 3}, "its options are: context"),
    ],
)
def test_mistakes_are_one_line(kind, options, expected):
    with pytest.raises(UserError) as caught:
        load_dataset(kind, **options)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_name_of_a_data_set_is_its_kind():
    for kind in ("digits", "stdlib_text"):
        assert load_dataset(kind).name == kind
    assert set(DATASETS) >= {"digits", "fashion_mnist", "stdlib_text", "text_file", "npz", "tokens"}


def test_numpy_only():
    """Loading data imports neither JAX nor scikit-learn, which take seconds."""
    code = (
        "import sys; from jaxdp.data import load_dataset; load_dataset('digits');"
        "print(sorted({'jax', 'jaxlib', 'sklearn', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"

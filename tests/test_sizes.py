"""Sizes as people write them."""

import pytest

from jaxdp.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1K", 1024),
        ("25M", 25 << 20),
        ("2g", 2 << 30),
        ("0.5k", 512),
        ("7", 7),
        (7, 7),
        ("1e3", 1000),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "K", "1.5", "0.3K", "1T", "inf", "nan", "1 MB", True, None, 1.0]
)
def test_what_is_no_size(text):
    with pytest.raises(ValueError):  # noqa: PT011  # pydantic and argparse make the message
        parse_bytes(text)

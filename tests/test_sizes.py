"""Sizes as people write them."""

import pytest

from jaxdp.sizes import is_power_of_two, parse_bytes, powers_of_two


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


def test_powers_of_two():
    by_doubling = [1, 2, 4, 8, 16, 32, 64]
    assert [n for n in range(1, 100) if is_power_of_two(n)] == by_doubling
    for most in range(1, 100):
        assert powers_of_two(most) == [n for n in by_doubling if n <= most]

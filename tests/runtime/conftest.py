"""What tests of several processes share."""

import socket

import pytest


@pytest.fixture
def free_address():
    """An address of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"

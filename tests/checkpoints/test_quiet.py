"""What Orbax's threads say does not reach the terminal; what others say does."""

import logging
import sys
import types

import pytest

from jaxdp.checkpoints.quiet import quiet


@pytest.fixture
def heard(monkeypatch):
    found = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, at: found.append(error))
    monkeypatch.setattr(sys, "unraisablehook", lambda event: found.append(event.exc_value))
    return found


def tell(error):
    sys.excepthook(type(error), error, None)
    sys.unraisablehook(types.SimpleNamespace(exc_value=error))


def test_late_callbacks_alone_are_not_heard(heard):
    late, ours = RuntimeError("Event loop is closed"), RuntimeError("Event loop is lost")
    hooks = sys.excepthook, sys.unraisablehook
    with quiet():
        tell(late)
        assert heard == []
        tell(ours)
        assert heard == [ours, ours]
        assert logging.getLogger("absl").getEffectiveLevel() == logging.CRITICAL
    assert (sys.excepthook, sys.unraisablehook) == hooks
    assert logging.getLogger("absl").getEffectiveLevel() < logging.CRITICAL
    tell(late)
    assert heard[2:] == [late, late]

"""Checkpoints: the only floor that knows Orbax."""

from jaxdp.checkpoints.store import Checkpoints

__all__ = ["Checkpoints"]

"""Gradient synchronisation: what turns every device's sums into the sum over all of them."""

from jaxdp.sync.all_reduce import all_reduce_sync
from jaxdp.sync.types import GradSync

__all__ = ["GradSync", "all_reduce_sync"]

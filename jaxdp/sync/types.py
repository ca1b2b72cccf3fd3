"""The form of a gradient synchronisation, in the manner of `optax.GradientTransformation`."""

from collections.abc import Callable
from typing import NamedTuple

from jaxdp.types import PyTree


class GradSync(NamedTuple):
    """Two pure functions.

    Attributes:
      init: tree -> state.  The state may differ between devices (residuals of a compression); its
        leaves have a leading dimension of one device each and stay sharded.
      update: (tree of this device's sums, state, axis_name) -> (tree of global sums, state), called
        inside `shard_map`.  It sums; dividing by the global weight is the step's.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, str], tuple[PyTree, PyTree]]

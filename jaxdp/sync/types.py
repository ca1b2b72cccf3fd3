"""The form of a gradient synchronisation, in the manner of `optax.GradientTransformation`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxdp.plan import Plan
from jaxdp.types import PyTree

# What is summed over devices: "grads", shaped as the parameters; "scalars", name -> [sum, weight];
# "model_state", times the device's weight.  A synchronisation may lose precision of "grads" only:
# a rounded weight would make every mean wrong.
Sums = dict[str, Any]


def no_options(platform: str) -> Mapping[str, str]:
    """No compiler options, on any platform."""
    return {}


class GradSync(NamedTuple):
    """Pure functions.

    Attributes:
      init: parameters -> one device's state.  It may come to differ between devices (residuals of
        a compression): the train state holds one of these per device.
      update: (this device's sums, state, axis_name) -> (global sums, state), called inside
        `shard_map`.  It sums; dividing by the global weight is the step's.
      plan: (sums as arrays or their shapes, number of devices) -> the collectives that `update`
        becomes in the compiled program; None where nobody stated them.
      compiler_options: platform -> what XLA needs to be told for the plan to hold.
      takes_order: whether `update` and `plan` take the optional keyword `order`: the numbers of the
        sums' leaves as they become ready (`sync.ready`), the same in both.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[Sums, PyTree]]
    plan: Callable[..., Plan] | None = None
    compiler_options: Callable[[str], Mapping[str, str]] = no_options
    takes_order: bool = False

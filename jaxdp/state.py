"""What a training run carries from step to step."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdp.types import PyTree


class TrainState(NamedTuple):
    """The whole state of a run; together with the seed it determines everything that follows.

    Attributes:
      step: int32 scalar, optimizer steps taken or skipped: the position in data and schedule.
      skipped: int32 scalar, steps without an update because the global weight was 0.
      nonfinite: int32 scalar, steps without an update because loss or gradient was not finite.
      nonfinite_run: int32 scalar, how many of them in a row up to now.
      params: float32 master parameters, equal on every device.
      model_state: what the model keeps besides, equal on every device.
      opt_state: the optimizer's state, equal on every device.
      sync_state: the synchronisation's state, one slot per device.
      loss_scale: a `LossScale` where the computation is in float16; else ().
    """

    step: Any
    skipped: Any
    nonfinite: Any
    nonfinite_run: Any
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    sync_state: PyTree
    loss_scale: Any = ()


class SavedForm(NamedTuple):
    """How a state is kept in checkpoints: the same whatever holds which part of it.

    Attributes:
      saved: state -> what is saved of it.
      like: state, or its shapes -> the saved one's shapes, dtypes and placement.
      restored: (what was saved, a state of the placement wanted) -> state.
    """

    saved: Callable[[TrainState], TrainState]
    like: Callable[[TrainState], TrainState]
    restored: Callable[[TrainState, TrainState], TrainState]


AS_IT_IS = SavedForm(lambda state: state, lambda state: state, lambda restored, like: restored)

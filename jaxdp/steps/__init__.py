"""Step builders: how the devices' gradients become one update."""

from jaxdp.steps.data_parallel import make_train_step
from jaxdp.steps.types import Metrics, TrainStep

__all__ = ["Metrics", "TrainStep", "make_train_step"]

"""Step builders: how the devices' gradients become one update."""

from jaxdp.steps.data_parallel import make_train_step
from jaxdp.steps.local_sgd import make_local_sgd_step, outer_sgd
from jaxdp.steps.types import Metrics, TrainStep

__all__ = ["Metrics", "TrainStep", "make_local_sgd_step", "make_train_step", "outer_sgd"]

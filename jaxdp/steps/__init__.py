"""Step builders: how the devices' gradients become one update."""

from jaxdp.steps.data_parallel import make_train_step
from jaxdp.steps.local_sgd import make_local_sgd_step, outer_sgd
from jaxdp.steps.reproducible import make_reproducible_step
from jaxdp.steps.types import CompiledStep, Metrics, TrainStep

__all__ = [
    "CompiledStep",
    "Metrics",
    "TrainStep",
    "make_local_sgd_step",
    "make_reproducible_step",
    "make_train_step",
    "outer_sgd",
]

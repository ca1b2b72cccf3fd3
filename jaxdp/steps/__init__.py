"""Step builders: how the devices' gradients become one update."""

from jaxdp.steps.data_parallel import make_train_step
from jaxdp.steps.reproducible import make_reproducible_step
from jaxdp.steps.types import CompiledStep, Metrics, TrainStep

__all__ = ["CompiledStep", "Metrics", "TrainStep", "make_reproducible_step", "make_train_step"]

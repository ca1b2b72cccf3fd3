"""What is checked: a training, as far as the questions need it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxdp.assemble import Job, assemble, make_sync
from jaxdp.choosing import choose_algorithm
from jaxdp.config import Config
from jaxdp.data import Dataset
from jaxdp.feeding import Batches
from jaxdp.steps import TrainStep
from jaxdp.sync import GradSync, ShardedSync
from jaxdp.types import Device, LossFn, PyTree

_MOST_PER_DEVICE = 4  # examples of a microbatch on a device: more prove no more, and take longer

_LOCAL_SGD = "local SGD is another algorithm, judged by its loss"


@dataclass(frozen=True)
class Subject:
    """A training to be checked.

    Attributes:
      loss_fn: what is trained.
      make_step: (mesh=, **options of its maker to be replaced) -> TrainStep.
      init: () -> (params, model state), the same each time.
      batches: the data stream; only the first `size` examples of each batch are used.
      size: examples per step.
      exact_sync: where the training's synchronisation loses by choice (a wire, a compression), the
        same without loss: equality is asked of it.  None: it loses nothing.
      compute_dtype: to which `make_step` casts parameters for the loss; None: their own.
      other_algorithm: why one device does not have to train as many do; None: it has to.
    """

    loss_fn: LossFn
    make_step: Callable[..., TrainStep]
    init: Callable[[], tuple[PyTree, PyTree]]
    batches: Batches
    size: int
    exact_sync: GradSync | ShardedSync | None = None
    compute_dtype: Any = None
    other_algorithm: str | None = None

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The examples of a step, every one of weight 1."""
        batch = {name: np.asarray(x)[: self.size] for name, x in self.batches.batch(step).items()}
        return {"weight": np.ones(self.size, np.float32), **batch}

    def weighted(self, step: int) -> dict[str, np.ndarray]:
        """The same with weights 0 to 4; the last quarter of the examples has weight 0."""
        rng = np.random.default_rng(step)
        weight = rng.integers(0, 5, self.size).astype(np.float32)
        weight[self.size - max(1, self.size // 4) :] = 0
        weight[0] = 1
        batch = self.batch(step)
        return batch | {"weight": batch["weight"] * weight}


def subject_of(
    config: Config, dataset: Dataset, devices: list[Device], algorithm: str | None = None
) -> Subject:
    """The subject of a configuration on `devices`.

    Args:
      algorithm: in place of `sync.algorithm`; None: what a run would use.

    Raises:
      UserError: `sync.tune_file` is missing or damaged.
    """
    algorithm = algorithm or choose_algorithm(config, dataset, devices).algorithm
    job: Job = assemble(config, dataset, devices, algorithm)
    local_steps = config.sync.local_steps
    shares = config.sync.logical_shards or len(devices) * (local_steps or 1)
    parts = config.microbatches * shares

    def init() -> tuple[PyTree, PyTree]:
        state = job.init()
        return jax.device_get((state.params, state.model_state))

    return Subject(
        loss_fn=job.loss_fn,
        make_step=job.make_step,
        init=init,
        batches=job.loader,
        size=min(config.global_batch, parts * _MOST_PER_DEVICE),
        exact_sync=_exact_sync(config, algorithm),
        compute_dtype=config.compute_dtype,
        other_algorithm=None if local_steps is None else _LOCAL_SGD,
    )


def _exact_sync(config: Config, algorithm: str) -> GradSync | ShardedSync | None:
    exact = {"wire": "float32", "compression": None}
    lossless = config.model_copy(update={"sync": config.sync.model_copy(update=exact)})
    return None if lossless == config else make_sync(lossless, algorithm)

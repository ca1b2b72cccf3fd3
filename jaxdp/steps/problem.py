"""What every step builder starts from: the loss of the parameters that are trained."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxdp.freeze import partition, with_frozen
from jaxdp.loss_scale import scaled
from jaxdp.state import TrainState
from jaxdp.types import LossFn, PyTree


@dataclass(frozen=True)
class Problem:
    """What is trained, whatever the devices do with its gradients.

    Attributes:
      loss: as `checked_loss` returns it.
      frozen: params -> tree of bool, which leaves are not trained.
      seed: of all randomness.
    """

    loss: LossFn
    frozen: Callable[[PyTree], PyTree]
    seed: int

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """(trained, frozen) parameters; `freeze.combine` is the inverse."""
        return partition(params, self.frozen(params))

    def trained(self, params: PyTree) -> PyTree:
        """The parameters that are trained."""
        return self.split(params)[0]

    def at(self, state: TrainState) -> tuple[LossFn, PyTree, jax.Array]:
        """A step's (loss of the trained parameters, times its scale; these; random key)."""
        trained, fixed = self.split(state.params)
        key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), state.step)
        return with_frozen(scaled(self.loss, state.loss_scale), fixed), trained, key

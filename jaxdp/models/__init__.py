"""Networks: Flax NNX modules as pairs of pure functions."""

from jaxdp.models.build import MODELS, build_model

__all__ = ["MODELS", "build_model"]

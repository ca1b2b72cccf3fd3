"""Networks, each as two pure functions (see `jaxdp.types.Model`)."""

from jaxdp.models.build import MODELS, build_model

__all__ = ["MODELS", "build_model"]

"""Checkpoints: the only floor that knows Orbax.

`Checkpoints` is loaded when first used (PEP 562): manifests can be read without JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.checkpoints.store import Checkpoints

__all__ = ["Checkpoints"]


def __getattr__(name: str) -> Any:
    if name != "Checkpoints":
        raise AttributeError(f"module 'jaxdp.checkpoints' has no attribute {name!r}")
    from jaxdp.checkpoints.store import Checkpoints

    return Checkpoints

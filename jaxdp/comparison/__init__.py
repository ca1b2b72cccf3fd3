"""Comparing algorithms on the devices at hand: checked results, times, a fitted network model.

Lazy, so that `python -m jaxdp.compare` finds mistakes, and starts processes, without JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.comparison.run import Comparison, fastest, run_compare

__all__ = ["Comparison", "fastest", "run_compare"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxdp.comparison import run

    return getattr(run, name)

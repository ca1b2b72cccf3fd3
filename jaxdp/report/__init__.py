"""What people look at: progress, run folders, pages, and schedules to watch.

Lazy, so that a program's progress line does not start JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.report.player import animate

__all__ = ["animate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxdp.report import player

    return getattr(player, name)

"""jaxdp: data-parallel training in JAX whose communication you can choose, measure, see and prove.

Names are loaded when first used (PEP 562), so that `import jaxdp` starts no JAX and
`jaxdp.emulate` can still choose the number of devices.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "GradSync": "jaxdp.sync",
    "LossOut": "jaxdp.types",
    "TrainState": "jaxdp.state",
    "all_gather": "jaxdp.collectives",
    "all_reduce": "jaxdp.collectives",
    "all_reduce_sync": "jaxdp.sync",
    "broadcast": "jaxdp.collectives",
    "data_mesh": "jaxdp.mesh",
    "emulate": "jaxdp.mesh",
    "evaluate": "jaxdp.evaluation",
    "fit": "jaxdp.loop",
    "load_config": "jaxdp.config",
    "make_eval_step": "jaxdp.evaluation",
    "make_local_sgd_step": "jaxdp.steps",
    "make_train_step": "jaxdp.steps",
    "on_mesh": "jaxdp.mesh",
    "plan_buckets": "jaxdp.sync",
    "reduce_scatter": "jaxdp.collectives",
    "run_compare": "jaxdp.comparison",
    "run_training": "jaxdp.training",
}

__all__ = [
    "GradSync",
    "LossOut",
    "TrainState",
    "all_gather",
    "all_reduce",
    "all_reduce_sync",
    "broadcast",
    "data_mesh",
    "emulate",
    "evaluate",
    "fit",
    "load_config",
    "make_eval_step",
    "make_local_sgd_step",
    "make_train_step",
    "on_mesh",
    "plan_buckets",
    "reduce_scatter",
    "run_compare",
    "run_training",
]

if TYPE_CHECKING:
    from jaxdp.collectives import all_gather, all_reduce, broadcast, reduce_scatter
    from jaxdp.comparison import run_compare
    from jaxdp.config import load_config
    from jaxdp.evaluation import evaluate, make_eval_step
    from jaxdp.loop import fit
    from jaxdp.mesh import data_mesh, emulate, on_mesh
    from jaxdp.state import TrainState
    from jaxdp.steps import make_local_sgd_step, make_train_step
    from jaxdp.sync import GradSync, all_reduce_sync, plan_buckets
    from jaxdp.training import run_training
    from jaxdp.types import LossOut


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]

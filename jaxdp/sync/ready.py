"""In which order gradients are ready: read off the jaxpr of the backward pass.

The order of leaves in a tree is that of their names, which says nothing of where a layer stands.
What must be computed before a gradient does: its depth, the number of equations on the longest
chain that leads to it.  The last layer's gradient has the forward pass behind it, the first layer's
the backward pass too, and a shared embedding's the last term of its sum.

DDP, which cannot see its program, notes the order in the first iteration and cuts its buckets anew.

Reference: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, section 4.2.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxdp.loss_path import inner_jaxprs

_ALL_AT_ONCE = ("scan", "while", "cond")  # their results are there when they end


def ready_order(jaxpr: Any) -> tuple[int, ...]:
    """The numbers of a jaxpr's results, those that are ready first in front.

    Results that are ready together, as all are after a scan over microbatches, keep the reverse of
    their order.
    """
    depths = _depths(jaxpr, [0] * len(jaxpr.invars))
    return tuple(sorted(range(len(depths)), key=lambda i: (depths[i], -i)))


def _depths(jaxpr: Any, given: Sequence[int]) -> list[int]:
    """The depth of each result, from those of the arguments; constants have depth 0."""
    depth: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))

    def of(variable: Any) -> int:
        return 0 if isinstance(variable, Literal) else depth.get(variable, 0)

    for eqn in jaxpr.eqns:
        inputs = [of(variable) for variable in eqn.invars]
        inner = _called(eqn)
        if inner is None:
            outputs = [1 + max(inputs, default=0)] * len(eqn.outvars)
        else:
            outputs = _depths(inner, inputs)
        depth.update(zip(eqn.outvars, outputs, strict=True))
    return [of(variable) for variable in jaxpr.outvars]


def _called(eqn: Any) -> Any:
    """The jaxpr that an equation only calls (jit, shard_map, remat, ..); None if it is no call."""
    if eqn.primitive.name in _ALL_AT_ONCE:
        return None
    found = list(inner_jaxprs(eqn))
    if len(found) != 1:
        return None
    [inner] = found
    same = len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)
    return inner if same else None

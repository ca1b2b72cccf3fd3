"""The gradients of a configuration's model, in buckets: a payload as real as the training's."""

from collections.abc import Sequence

import jax

from jaxdp.assemble import load_data, param_shapes
from jaxdp.comparison.cases import DTYPES
from jaxdp.config import load_config


def gradient_buckets(config_path: str, caps: Sequence[int], dtype: str) -> list[tuple[int, ...]]:
    """Elements per bucket, for each bucket size; the model is never allocated.

    Args:
      config_path: a training configuration.
      caps: bucket sizes in bytes, the sweep.
      dtype: of the gradients on the wire.

    Raises:
      UserError: the configuration or its data cannot be used.
    """
    config = load_config(config_path)
    params = param_shapes(config, load_data(config))
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    found = [pack(sizes, cap // DTYPES[dtype].itemsize) for cap in caps]
    return list(dict.fromkeys(found))  # caps beyond the model's size give the same single bucket


def pack(sizes: Sequence[int], cap: int) -> tuple[int, ...]:
    """Leaves joined into buckets of at most `cap` elements, last leaf first.

    Gradients of the last layers are ready first.  A leaf that is larger makes a bucket of its own.
    """
    buckets: list[int] = []
    for size in reversed(sizes):
        if buckets and buckets[-1] + size <= cap:
            buckets[-1] += size
        else:
            buckets.append(size)
    return tuple(buckets)

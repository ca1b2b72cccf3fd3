"""The gradients of a configuration's model, in buckets: a payload as real as the training's."""

from collections.abc import Sequence

import jax

from jaxdp.assemble import load_data, param_shapes
from jaxdp.comparison.cases import DTYPES
from jaxdp.config import load_config
from jaxdp.sync import plan_buckets


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
    leaves = [jax.ShapeDtypeStruct(leaf.shape, DTYPES[dtype]) for leaf in jax.tree.leaves(params)]
    found = [
        tuple(
            sum(leaves[i].size for i in bucket.leaves) for bucket in plan_buckets(leaves, cap, cap)
        )
        for cap in caps
    ]
    return list(dict.fromkeys(found))  # caps beyond the model's size give the same single bucket

"""Which all-reduce a run uses: the configuration's, or what `auto` comes to."""

from jaxdp import peers
from jaxdp.assemble import param_shapes
from jaxdp.collectives.tuning import Choice, choose
from jaxdp.comparison import fastest
from jaxdp.config import Config
from jaxdp.data import Dataset
from jaxdp.hlo import format_bytes
from jaxdp.steps import reproducible
from jaxdp.trees import count_bytes
from jaxdp.types import Device

_HOW_OFTEN = {
    None: "one reduction per step",
    "top_k": "one reduction and two gathers per step",
    "power_sgd": "three reductions per step",
}


def choose_algorithm(config: Config, dataset: Dataset, devices: list[Device]) -> Choice:
    """The algorithm of the configuration, or what `auto` comes to, and why.

    One for all buckets of the run, for a full one: gradients of all parameters, or
    `sync.bucket_bytes` of them.

    Raises:
      UserError: `sync.tune_file` is missing or damaged.
    """
    sync = config.sync
    if sync.logical_shards is not None:
        return Choice(*reproducible.described(sync.logical_shards, devices[0].platform))
    if sync.algorithm != "auto":
        how = _HOW_OFTEN[sync.compression]
        if sync.bucket_bytes is not None:
            how = f"in buckets of at most {format_bytes(sync.bucket_bytes)}"
        return Choice(sync.algorithm, how)
    nbytes = count_bytes(param_shapes(config, dataset))
    if sync.bucket_bytes is not None:
        nbytes = min(nbytes, sync.bucket_bytes)
    if sync.tune == "file":  # of which every host may have its own
        return Choice(*peers.from_first(lambda: choose(nbytes, len(devices), sync.tune_file)))
    return fastest(devices, nbytes)

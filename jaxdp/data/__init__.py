"""Data sets, and the stream of batches that a run trains on.  NumPy only."""

from jaxdp.data.loader import Loader, eval_batches
from jaxdp.data.permutation import permute
from jaxdp.data.prefetch import Prefetch, prefetch
from jaxdp.data.registry import DATASETS, load_dataset
from jaxdp.data.source import Dataset, Source

__all__ = [
    "DATASETS",
    "Dataset",
    "Loader",
    "Prefetch",
    "Source",
    "eval_batches",
    "load_dataset",
    "permute",
    "prefetch",
]

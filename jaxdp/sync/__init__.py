"""Gradient synchronisation: what turns every device's sums into the sum over all of them."""

from jaxdp.sync.all_reduce import all_reduce_sync
from jaxdp.sync.buckets import Bucket, plan_buckets
from jaxdp.sync.ready import ready_order
from jaxdp.sync.sharded import ShardedSync, sharded_sync
from jaxdp.sync.types import GradSync, Sums

__all__ = [
    "Bucket",
    "GradSync",
    "ShardedSync",
    "Sums",
    "all_reduce_sync",
    "plan_buckets",
    "ready_order",
    "sharded_sync",
]

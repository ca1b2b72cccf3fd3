"""Guards: replicas that drift apart, numbers that are not finite."""

from jaxdp.guard.fingerprint import fingerprint, fingerprint_numpy
from jaxdp.guard.replicas import Difference, compare_replicas, describe_differences

__all__ = [
    "Difference",
    "compare_replicas",
    "describe_differences",
    "fingerprint",
    "fingerprint_numpy",
]

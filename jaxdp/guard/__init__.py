"""Guards: replicas that drift apart, numbers that are not finite."""

from jaxdp.guard.fingerprint import fingerprint, fingerprint_numpy
from jaxdp.guard.policy import FaultError, Guard
from jaxdp.guard.replicas import Difference, compare_replicas, describe_differences

__all__ = [
    "Difference",
    "FaultError",
    "Guard",
    "compare_replicas",
    "describe_differences",
    "fingerprint",
    "fingerprint_numpy",
]

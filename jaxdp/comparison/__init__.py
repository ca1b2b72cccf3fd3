"""Comparing algorithms on the devices at hand: checked results, times, a fitted network model."""

from jaxdp.comparison.run import Comparison, fastest, run_compare

__all__ = ["Comparison", "fastest", "run_compare"]

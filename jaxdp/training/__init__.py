"""A whole run from its configuration: what `python -m jaxdp.train` does, as functions."""

from jaxdp.training.run import run_training
from jaxdp.training.summary import describe_summary

__all__ = ["describe_summary", "run_training"]

"""The configuration of a run: its schema, its rules, its file, its command line, its help.

Importing it imports no JAX, so that a mistake is reported before anything else happens.
"""

from jaxdp.config.args import Args, parse_args
from jaxdp.config.dump import agreed_keys, describe_batch, diff, to_yaml
from jaxdp.config.help import help_text
from jaxdp.config.keys import flatten
from jaxdp.config.load import load_config
from jaxdp.config.rules import check_devices
from jaxdp.config.schema import ALGORITHMS, Config
from jaxdp.config.words import bare

__all__ = [
    "ALGORITHMS",
    "Args",
    "Config",
    "agreed_keys",
    "bare",
    "check_devices",
    "describe_batch",
    "diff",
    "flatten",
    "help_text",
    "load_config",
    "parse_args",
    "to_yaml",
]

"""A resolved configuration as YAML, its batch in words, the differences between two of them."""

import math
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq

from jaxdp.config.keys import flatten
from jaxdp.config.schema import Config
from jaxdp.config.words import bare
from jaxdp.wording import counted

_EACH_ITS_OWN = ("out", "log.progress")  # where and how a process tells of the run


def _plain(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    items = CommentedSeq(value)
    items.fa.set_flow_style()  # [512, 512] on one line
    return items


def to_yaml(config: Config) -> str:
    """All keys of a configuration, defaults too, in the order of the schema.

    `load_config` reads the text back to an equal configuration.
    """
    tree: dict[str, Any] = {}
    for path, value in flatten(config).items():
        section, _, leaf = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = _plain(value)
    yaml = YAML()
    yaml.width = 2**31  # never fold a text
    yaml.representer.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    text = StringIO()
    yaml.dump(tree, text)
    return text.getvalue()


def describe_batch(config: Config, devices: int) -> str:
    """How the global batch is cut: `192 = 24 examples x 2 microbatches x 4 devices`."""
    sizes = {"microbatch": config.microbatches, "device": devices}
    if config.sync.local_steps is not None:
        sizes["local step"] = config.sync.local_steps
    each = config.global_batch // math.prod(sizes.values())
    factors = [counted(each, "example"), *(counted(n, name) for name, n in sizes.items())]
    return f"{config.global_batch} = {' x '.join(factors)}"


def agreed_keys(config: Config) -> dict[str, str]:
    """What the processes of a job must have in common: all but where and how each of them tells."""
    return {k: bare(v) for k, v in flatten(config).items() if k not in _EACH_ITS_OWN}


def diff(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configurations differ, with both values.

    A key that exists on one side only, since kinds differ, is None on the other.
    """
    left, right = flatten(a), flatten(b)
    return {
        path: (left.get(path), right.get(path))
        for path in left | right
        if left.get(path) != right.get(path)
    }

"""All kinds of data, by name."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from jaxdp.data.arrays import load_npz
from jaxdp.data.images import load_digits, load_fashion_mnist
from jaxdp.data.source import Dataset
from jaxdp.data.text import load_stdlib_text, load_text_file
from jaxdp.data.tokens import load_tokens
from jaxdp.errors import UserError

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": load_digits,
    "fashion_mnist": load_fashion_mnist,
    "stdlib_text": load_stdlib_text,
    "text_file": load_text_file,
    "npz": load_npz,
    "npy": load_npz,
    "tokens": load_tokens,
}


def load_dataset(kind: str, **options: Any) -> Dataset:
    """Loads the data set of a kind in `DATASETS`; options are the arguments of its function.

    Raises:
      UserError: an unknown kind or option, an option that is missing, data that cannot be used.
    """
    if kind not in DATASETS:
        near = difflib.get_close_matches(kind, DATASETS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"data kind {kind!r}: expected one of {', '.join(DATASETS)}{hint}")
    load = DATASETS[kind]
    signature = inspect.signature(load)
    try:
        signature.bind(**options)
    except TypeError as error:
        accepted = ", ".join(signature.parameters) or "none"
        raise UserError(f"data kind {kind}: {error}; its options are: {accepted}") from error
    return load(**options)

"""Frozen leaves: parameters that are not trained.

A frozen leaf has no gradient at all: none is computed, none travels, the optimizer has no state
for it, and it is no part of the gradient's norm.
"""

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from jaxdp.errors import UserError
from jaxdp.trees import named_leaves
from jaxdp.types import Batch, LossFn, PyTree

_SHOWN = 3  # names in a message


def freeze(patterns: Sequence[str]) -> Callable[[PyTree], PyTree]:
    """params -> a tree of bool of their structure, True where a leaf's name matches a pattern.

    Args:
      patterns: of names such as `layers/0/kernel`, with `*` for any number of characters, `?` for
        one and `[ab]` for one of several.

    Raises (when it is called with parameters):
      UserError: a pattern matches no leaf, or all leaves are frozen.
    """

    def mask(params: PyTree) -> PyTree:
        names = [name for name, _ in named_leaves(params)]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, _SHOWN, 0) or names[:_SHOWN]
                raise UserError(
                    f"freeze: {pattern!r} matches no parameter; expected a name or a pattern such "
                    f"as {', '.join(near)}"
                )
        frozen = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in names]
        if frozen and all(frozen):
            raise UserError(
                f"freeze: {', '.join(patterns)} freezes all {len(names)} leaves; expected that "
                "something is left to train"
            )
        return jax.tree.unflatten(jax.tree.structure(params), frozen)

    return mask


def nothing(params: PyTree) -> PyTree:
    """The mask that freezes no leaf."""
    return jax.tree.map(lambda _: False, params)


def partition(params: PyTree, mask: PyTree) -> tuple[PyTree, PyTree]:
    """(trained, frozen): both of the structure of `params`, with None for the other's leaves."""
    trained = jax.tree.map(lambda x, frozen: None if frozen else x, params, mask)
    return trained, jax.tree.map(lambda x, frozen: x if frozen else None, params, mask)


def combine(trained: PyTree, frozen: PyTree) -> PyTree:
    """The inverse of `partition`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None
    )


def with_frozen(loss: LossFn, frozen: PyTree) -> LossFn:
    """`loss` as a function of the trained parameters alone."""

    def of_trained(params: PyTree, model_state: PyTree, batch: Batch, keys: Any) -> Any:
        return loss(combine(params, frozen), model_state, batch, keys)

    return of_trained

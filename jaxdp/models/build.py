"""From a model's name and options to two pure functions.

The networks are Flax NNX modules, split once into a static graph and plain dicts of arrays, and
merged only while a step is traced: a compiled step knows nothing of NNX.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.errors import UserError
from jaxdp.models.batch_norm import Mode
from jaxdp.models.cnn import CNN
from jaxdp.models.gpt import GPT
from jaxdp.models.mlp import MLP
from jaxdp.models.resnet import ResNet
from jaxdp.types import Model


def as_model(
    make: Callable[[nnx.Rngs], Any], check: Callable[[jax.Array], None], *, weighted: bool = False
) -> Model:
    """The pure functions of a module that is called as `module(inputs, keys)`.

    Args:
      make: builds the module; its `nnx.Param`s are the params, all else is the model state.
      check: raises a `UserError` for inputs of a wrong shape or dtype (seen while tracing).
      weighted: the module takes the examples' weights as a third argument.
    """

    def split(module):
        graph, params, state = nnx.split(module, nnx.Param, ...)
        return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    graph, _, _ = split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key):
        return split(make(nnx.Rngs(key)))[1:]

    def apply(params, model_state, inputs, keys, weight=None):
        check(inputs)
        dtype = jnp.result_type(*jax.tree.leaves(params))
        if jnp.issubdtype(inputs.dtype, jnp.floating):
            inputs = inputs.astype(dtype)
        module = nnx.merge(graph, params, model_state)
        outputs = module(inputs, keys, weight) if weighted else module(inputs, keys)
        return outputs.astype(jnp.promote_types(dtype, jnp.float32)), split(module)[2]

    return Model(init, apply, weighted)


def mlp(
    shape: tuple[int, ...],
    num_classes: int,
    hidden: Sequence[int] = (512, 512),
    dropout: float = 0.0,
) -> Model:
    """See `MLP`; inputs of any shape, which are flattened."""
    return as_model(
        lambda rngs: MLP(math.prod(shape), num_classes, hidden, dropout, rngs),
        lambda inputs: _check_shape(inputs, shape),
    )


def cnn(
    shape: tuple[int, ...],
    num_classes: int,
    channels: Sequence[int] = (16, 32),
    hidden: int = 128,
    dropout: float = 0.0,
) -> Model:
    """See `CNN`; `shape` is (height, width, channels)."""
    if len(shape) != 3:
        raise UserError(f"cnn needs images of (height, width, channels), got shape {shape}")
    height, width, depth = shape
    if min(height, width) < 2 ** len(channels):
        raise UserError(
            f"cnn halves images once per entry of channels: {len(channels)} times is too often "
            f"for {height}x{width}, at most {min(height, width).bit_length() - 1} entries"
        )
    return as_model(
        lambda rngs: CNN((height, width, depth), num_classes, channels, hidden, dropout, rngs),
        lambda inputs: _check_shape(inputs, shape),
    )


def resnet(
    shape: tuple[int, ...],
    num_classes: int,
    channels: Sequence[int] = (16, 32, 64),
    blocks: int = 1,
    batch_norm: Mode = "sync",
) -> Model:
    """See `ResNet`; `shape` is (height, width, channels)."""
    if len(shape) != 3:
        raise UserError(f"resnet needs images of (height, width, channels), got shape {shape}")
    if batch_norm not in ("sync", "local"):
        raise UserError(f"batch_norm must be sync or local, got {batch_norm!r}")
    return as_model(
        lambda rngs: ResNet(shape[2], num_classes, channels, blocks, batch_norm, rngs),
        lambda inputs: _check_shape(inputs, shape),
        weighted=True,
    )


def gpt(
    shape: tuple[int, ...],
    num_classes: int,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.0,
    positions: str = "learned",
    remat: bool = False,
) -> Model:
    """See `GPT`; `shape` is (context,) and `num_classes` the size of the vocabulary."""
    if len(shape) != 1:
        raise UserError(f"gpt needs sequences of shape (context,), got shape {shape}")
    if positions not in ("learned", "rotary"):
        raise UserError(f"positions must be learned or rotary, got {positions!r}")
    if width % heads:
        raise UserError(f"gpt needs a width divisible by heads, got width {width}, heads {heads}")
    if positions == "rotary" and width // heads % 2:
        raise UserError(
            f"rotary positions turn pairs of features, but width {width} / heads {heads} "
            f"= {width // heads} is odd"
        )

    def check(tokens):
        if tokens.ndim != 2 or tokens.shape[1] > shape[0]:
            raise UserError(
                f"gpt takes tokens [batch, time <= {shape[0]}], got shape {list(tokens.shape)}"
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise UserError(f"gpt takes integer tokens, got {tokens.dtype}")

    return as_model(
        lambda rngs: GPT(
            shape[0], num_classes, layers, width, heads, dropout, positions, remat, rngs
        ),
        check,
    )


MODELS: dict[str, Callable[..., Model]] = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "gpt": gpt}


def build_model(kind: str, *, shape: Sequence[int], num_classes: int, **options: Any) -> Model:
    """A model of the table.

    Args:
      kind: a key of `MODELS`.
      shape: of one example, without the batch dim.
      num_classes: how many logits per example, or per token.
      options: those of the row, such as `hidden=[512, 512]`.

    Raises:
      UserError: an unknown kind or option, a missing option, sizes that do not fit.
    """
    if kind not in MODELS:
        raise UserError(f"unknown model {kind!r}: choose one of {', '.join(MODELS)}")
    known = list(inspect.signature(MODELS[kind]).parameters)[2:]
    if unknown := sorted(options.keys() - known):
        raise UserError(
            f"model {kind} has no option {', '.join(unknown)}; its options: {', '.join(known)}"
        )
    if not 0.0 <= options.get("dropout", 0.0) < 1.0:
        raise UserError(f"dropout must be at least 0 and below 1, got {options['dropout']}")
    return MODELS[kind](tuple(shape), num_classes, **options)


def _check_shape(inputs: jax.Array, shape: tuple[int, ...]) -> None:
    if inputs.shape[1:] != shape:
        expected = ", ".join(map(str, ("batch", *shape)))
        raise UserError(f"the model takes inputs [{expected}], got {list(inputs.shape)}")

"""The models, data sets and optimizers that a configuration chooses from, each with its keys.

One class per `kind`.  `schema.py` puts them together.
"""

import os
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from jaxdp.sizes import parse_bytes

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Positive = Annotated[float, Gt(0)]
InnerFraction = Annotated[float, Gt(0), Lt(1)]
Fraction = Annotated[float, Gt(0), Le(1)]
Text = Annotated[str, MinLen(1)]


def _expanded(path: str) -> str:
    """With `~` replaced, which shells leave in `--out=~/run` and YAML leaves anywhere."""
    if "\0" in path:
        raise ValueError("no path has a NUL in it")
    return os.path.expanduser(path)


PathName = Annotated[str, MinLen(1), AfterValidator(_expanded)]
# A tuple, since a frozen model should be frozen all the way; strict would refuse YAML's lists.
Counts = Annotated[tuple[Count, ...], Field(strict=False)]
Names = Annotated[tuple[Text, ...], Field(strict=False)]
SomeCounts = Annotated[tuple[Count, ...], MinLen(1), Field(strict=False)]

# A marker too: `words` looks for it to say what is expected.
READS_BYTES = BeforeValidator(parse_bytes)
Bytes = Annotated[int, READS_BYTES, Ge(1)]

Task = Literal["classes", "text"]  # what a model learns and a data set offers


class Section(BaseModel):
    """Base of all sections: strict types, immutable, no unknown keys, no NaN and no infinity."""

    task: ClassVar[Task | None] = None  # of models and data sets

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Mlp(Section):
    """A multi-layer perceptron over flattened examples."""

    task: ClassVar[Task | None] = "classes"
    kind: Literal["mlp"] = Field(default="mlp", description="multi-layer perceptron")
    hidden: Counts = Field(
        default=(512, 512), description="units of each hidden layer; [] is linear"
    )
    dropout: BelowOne = Field(default=0.0, description="share of units dropped in training")


class Cnn(Section):
    """A convolutional network over images."""

    task: ClassVar[Task | None] = "classes"
    kind: Literal["cnn"] = Field(default="cnn", description="convolutional network over images")
    channels: SomeCounts = Field(default=(32, 64), description="channels of each convolution")
    hidden: Count = Field(default=128, description="units of the dense layer before the output")
    dropout: BelowOne = Field(default=0.0, description="share of units dropped in training")


class Resnet(Section):
    """A residual network over images, with batch normalisation."""

    task: ClassVar[Task | None] = "classes"
    kind: Literal["resnet"] = Field(
        default="resnet", description="residual network over images, with batch norm"
    )
    channels: SomeCounts = Field(default=(16, 32, 64), description="channels of each stage")
    blocks: Count = Field(default=1, description="blocks of each stage")
    batch_norm: Literal["sync", "local"] = Field(
        default="sync",
        description="statistics over all devices, or each device's own (depends on devices)",
    )


class Gpt(Section):
    """A decoder-only transformer over tokens."""

    task: ClassVar[Task | None] = "text"
    kind: Literal["gpt"] = Field(default="gpt", description="decoder-only transformer over tokens")
    layers: Count = Field(default=4, description="transformer blocks")
    width: Count = Field(
        default=128, description="features of each token; divisible by model.heads"
    )
    heads: Count = Field(default=4, description="attention heads of each block")
    dropout: BelowOne = Field(default=0.0, description="share of activations dropped in training")
    positions: Literal["learned", "rotary"] = Field(
        default="rotary",
        description="how positions are told; rotary needs width / heads to be even",
    )
    remat: bool = Field(
        default=False,
        description="keep only the blocks' inputs for the backward pass and compute the rest "
        "again: less memory, more time",
    )


class Digits(Section):
    """The 1,797 handwritten digits of scikit-learn."""

    task: ClassVar[Task | None] = "classes"
    kind: Literal["digits"] = Field(
        default="digits", description="1,797 digits of 8 x 8 pixels, built in"
    )


class FashionMnist(Section):
    """Fashion-MNIST, read from files that are already on the machine."""

    task: ClassVar[Task | None] = "classes"
    kind: Literal["fashion_mnist"] = Field(
        default="fashion_mnist",
        description="70,000 images of clothes, 28 x 28 pixels, from local files",
    )
    path: PathName | None = Field(
        default=None,
        description="folder of the four files; null looks where the Debian package puts them",
    )


class _Arrays(Section):
    path: PathName = Field(description="file or folder of the training examples")
    heldout_path: PathName | None = Field(
        default=None,
        description="examples for evaluation; null: a fraction of data.path is held out",
    )
    heldout_fraction: InnerFraction = Field(
        default=0.1,
        description="share of the examples kept for evaluation, without data.heldout_path",
    )


class Npz(_Arrays):
    """Arrays x and y of an .npz file."""

    task: ClassVar[Task | None] = "classes"
    kind: Literal["npz"] = Field(
        default="npz", description="arrays inputs and label of one .npz file"
    )


class Npy(_Arrays):
    """Arrays x and y as .npy files of a folder, mapped into memory."""

    task: ClassVar[Task | None] = "classes"
    kind: Literal["npy"] = Field(
        default="npy", description="a folder with inputs.npy and label.npy, mapped into memory"
    )


class _Windows(Section):
    context: Count = Field(default=128, description="tokens of each example")


class StdlibText(_Windows):
    """The source of Python's standard library, as text."""

    task: ClassVar[Task | None] = "text"
    kind: Literal["stdlib_text"] = Field(
        default="stdlib_text", description="the source of Python's standard library, built in"
    )


class TextFile(_Windows):
    """A text file of the user, read as bytes."""

    task: ClassVar[Task | None] = "text"
    kind: Literal["text_file"] = Field(default="text_file", description="a text file of yours")
    path: PathName = Field(description="file of the training examples")
    heldout_fraction: InnerFraction = Field(
        default=0.05, description="share of the text kept for evaluation"
    )


class Tokens(_Windows):
    """Token ids prepared by the user."""

    task: ClassVar[Task | None] = "text"
    kind: Literal["tokens"] = Field(
        default="tokens", description="your token ids, raw little-endian uint16"
    )
    path: PathName = Field(description="file of the training examples")
    vocab_size: Annotated[int, Ge(2)] | None = Field(
        default=None, description="number of distinct tokens; null: the largest id found, plus 1"
    )
    heldout_path: PathName | None = Field(
        default=None,
        description="examples for evaluation; null: a fraction of data.path is held out",
    )
    heldout_fraction: InnerFraction = Field(
        default=0.05,
        description="share of the examples kept for evaluation, without data.heldout_path",
    )


class _Optimizer(Section):
    learning_rate: Positive = Field(default=1e-3, description="learning rate after the warm-up")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="how the learning rate goes on after the warm-up"
    )
    warmup_steps: CountOrZero = Field(
        default=0, description="optimizer steps in which the learning rate rises; fewer than steps"
    )
    end_fraction: Annotated[float, Ge(0), Le(1)] = Field(
        default=0.0,
        description="learning rate after the last step, as a fraction; for cosine or linear",
    )
    clip_norm: Positive | None = Field(
        default=None, description="largest global norm of the reduced gradient; null does not clip"
    )
    freeze: Names = Field(
        default=(), description="names of parameters that are not trained; * stands for anything"
    )


class _Decaying(_Optimizer):
    weight_decay: Annotated[float, Ge(0)] = Field(
        default=0.0, description="weight decay of matrices, in units of the learning rate"
    )


class _Moments(Section):
    b1: BelowOne = Field(default=0.9, description="decay of the first moment")
    b2: BelowOne = Field(default=0.999, description="decay of the second moment")
    eps: Positive = Field(default=1e-8, description="added to the root of the second moment")


class Sgd(_Decaying):
    """Plain gradient descent."""

    kind: Literal["sgd"] = Field(default="sgd", description="gradient descent")
    learning_rate: Positive = Field(default=0.1, description="learning rate after the warm-up")


class Momentum(_Decaying):
    """Gradient descent with momentum."""

    kind: Literal["momentum"] = Field(
        default="momentum", description="gradient descent with momentum"
    )
    learning_rate: Positive = Field(default=0.05, description="learning rate after the warm-up")
    momentum: BelowOne = Field(default=0.9, description="share of the velocity kept at each step")
    nesterov: bool = Field(default=False, description="look ahead, as Nesterov does")


class Adam(_Moments, _Optimizer):
    """Adam; for weight decay there is adamw."""

    kind: Literal["adam"] = Field(default="adam", description="Adam; with weight decay: adamw")


class AdamW(_Moments, _Decaying):
    """Adam with decoupled weight decay."""

    kind: Literal["adamw"] = Field(default="adamw", description="Adam with decoupled weight decay")


class Lion(_Decaying):
    """Lion: the sign of an interpolated momentum."""

    kind: Literal["lion"] = Field(default="lion", description="sign of an interpolated momentum")
    learning_rate: Positive = Field(default=1e-4, description="learning rate after the warm-up")
    b1: BelowOne = Field(default=0.9, description="weight of the momentum in the update")
    b2: BelowOne = Field(default=0.99, description="decay of the momentum")


class Adafactor(_Decaying):
    """Adafactor: a factored second moment."""

    kind: Literal["adafactor"] = Field(default="adafactor", description="Adam with little memory")
    learning_rate: Positive = Field(default=1e-2, description="learning rate after the warm-up")


Model = Annotated[Mlp | Cnn | Resnet | Gpt, Field(discriminator="kind")]
Data = Annotated[
    Digits | FashionMnist | StdlibText | TextFile | Npz | Npy | Tokens,
    Field(discriminator="kind"),
]
Optimizer = Annotated[Sgd | Momentum | Adam | AdamW | Lion | Adafactor, Field(discriminator="kind")]

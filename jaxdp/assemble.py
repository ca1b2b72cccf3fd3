"""From a configuration to the parts of a run: data, model, step, evaluation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdp.checkpoints.export import PARTS, Form, check_importable, import_leaves
from jaxdp.config import Config
from jaxdp.data import Dataset, Loader, eval_batches, load_dataset
from jaxdp.evaluation import EvalStep, evaluate, make_eval_step
from jaxdp.freeze import freeze
from jaxdp.losses import classification_loss, language_loss
from jaxdp.mesh import data_mesh
from jaxdp.models import build_model
from jaxdp.optim import build_optimizer, build_schedule
from jaxdp.state import TrainState
from jaxdp.steps import (
    TrainStep,
    make_local_sgd_step,
    make_reproducible_step,
    make_train_step,
    outer_sgd,
)
from jaxdp.sync import (
    GradSync,
    ShardedSync,
    all_reduce_sync,
    power_sgd_sync,
    sharded_sync,
    top_k_sync,
)
from jaxdp.trees import named_leaves
from jaxdp.types import Device, LossFn, Model, PyTree

_INIT_FOLD = 2**32 - 1  # training folds in the number of the step, which stays below
_SCHEDULE = ("schedule", "learning_rate", "steps", "warmup_steps", "end_fraction")
# bytes per token -> what the bits of a token are called
_BITS: dict[float | None, str] = {1.0: "bits_per_byte"}


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, ready to be put together by hand as well.

    Attributes:
      dataset, loader: what is trained on, and in which order.
      loss_fn: of the model, for training (with keys) and evaluation (without).
      step, eval_step: compiled when first called.
      make_step: this run's step builder with its arguments, of which any can be replaced.
      init: makes the state before step 0.
      evaluate: state -> means over the held-out examples; `on_batch` as in `evaluate`.
    """

    dataset: Dataset
    loader: Loader
    mesh: Mesh
    loss_fn: LossFn
    step: TrainStep
    make_step: Callable[..., TrainStep]
    eval_step: EvalStep
    init: Callable[[], TrainState]
    evaluate: Callable[..., dict[str, float]]


def load_data(config: Config) -> Dataset:
    """The data set of a configuration, in host memory; touches no device.

    Raises:
      UserError: it is missing or damaged.
    """
    options = config.data.model_dump(exclude_none=True)
    if "heldout_path" in options:
        del options["heldout_fraction"]  # a default: the configuration refuses both
    return load_dataset(**options)


def make_model(config: Config, dataset: Dataset) -> Model:
    """The model of a configuration, sized for its data; allocates nothing."""
    options = config.model.model_dump()
    return build_model(shape=dataset.shape, num_classes=dataset.num_classes, **options)


def param_shapes(config: Config, dataset: Dataset) -> PyTree:
    """Shapes and dtypes of the parameters; starts no device, which `emulate` may still have to."""
    return _model_shapes(config, dataset)["params"]


def check_names(config: Config, dataset: Dataset) -> None:
    """Starts no device.

    Raises:
      UserError: `optimizer.freeze` names no parameter, or `init_from` does not fit the model.
    """
    if patterns := config.optimizer.freeze:  # else the model need not be traced for it
        freeze(patterns)(param_shapes(config, dataset))
    if config.init_from is not None:
        check_importable(Path(config.init_from), _forms(_model_shapes(config, dataset)))


def _model_shapes(config: Config, dataset: Dataset) -> dict[str, PyTree]:
    init = make_model(config, dataset).init
    return dict(zip(PARTS, jax.eval_shape(lambda: init(jax.random.key(0))), strict=True))


def _forms(shapes: PyTree) -> dict[str, Form]:
    return {name: Form(str(leaf.dtype), leaf.shape) for name, leaf in named_leaves(shapes)}


def _imported(path: Path, shapes: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
    """Parameters and model state of a file, on the host."""
    leaves = list(import_leaves(path, _forms(shapes)).values())
    tree = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return tree["params"], tree["model_state"]


def make_sync(config: Config, algorithm: str | None = None) -> GradSync | ShardedSync:
    """How a configuration sums over devices, with `algorithm` in place of its own if given."""
    algorithm = algorithm or config.sync.algorithm
    if config.sync.shard_optimizer:
        return sharded_sync(algorithm, config.sync.wire)
    if config.sync.compression == "top_k":
        return top_k_sync(config.sync.top_k_fraction, algorithm=algorithm)
    if config.sync.compression == "power_sgd":
        return power_sgd_sync(config.sync.power_sgd_rank, algorithm=algorithm)
    return all_reduce_sync(
        algorithm,
        bucket_bytes=config.sync.bucket_bytes,
        first_bucket_bytes=config.sync.first_bucket_bytes,
        wire=config.sync.wire,
    )


def what_travels(config: Config) -> str:
    """The gradients on their way, in words."""
    sync = config.sync
    if sync.compression == "top_k":
        return f"the largest {100 * sync.top_k_fraction:g} %"
    if sync.compression == "power_sgd":
        return f"factors of rank {sync.power_sgd_rank}"
    return sync.wire


def _step_builder(config: Config, algorithm: str | None) -> Callable[..., TrainStep]:
    """The builder with what is its own; `algorithm` in place of `sync.algorithm` if given."""
    if config.sync.logical_shards is not None:
        return partial(make_reproducible_step, logical_shards=config.sync.logical_shards)
    sync: Any = make_sync(config, algorithm)  # the configuration fits it to the builder
    if config.sync.local_steps is None:
        return partial(make_train_step, sync=sync, peel_last=config.sync.peel_last)
    return partial(
        make_local_sgd_step,
        sync=sync,
        local_steps=config.sync.local_steps,
        outer_optimizer=outer_sgd(config.sync.outer_learning_rate, config.sync.outer_momentum),
    )


def assemble(
    config: Config, dataset: Dataset, devices: list[Device], algorithm: str | None = None
) -> Job:
    """Puts a run together on `devices`, with `algorithm` in place of `sync.algorithm` if given.

    Raises:
      UserError: the data do not fit the batch, or the model does not fit the data.
    """
    loader = Loader(dataset.train, config.global_batch, config.seed)
    mesh = data_mesh(devices)
    model = make_model(config, dataset)
    loss_fn = (
        classification_loss(model)
        if dataset.task == "classification"
        else language_loss(model, _BITS.get(dataset.bytes_per_token, "bits_per_token"))
    )
    optimizer: dict[str, Any] = config.optimizer.model_dump(exclude={"clip_norm", "freeze"})
    optimizer["steps"] = config.steps
    rates = {name: optimizer[name] for name in _SCHEDULE}
    dtype = None if config.compute_dtype == "float32" else config.compute_dtype
    make_step = partial(
        _step_builder(config, algorithm),
        loss_fn=loss_fn,
        optimizer=build_optimizer(**optimizer),
        mesh=mesh,
        microbatches=config.microbatches,
        clip_norm=config.optimizer.clip_norm,
        compute_dtype=dtype,
        seed=config.seed,
        learning_rate=build_schedule(**rates),
        frozen=freeze(config.optimizer.freeze),
    )
    step = make_step()
    eval_step = make_eval_step(loss_fn, mesh, compute_dtype=dtype)
    # as many as are known to fit, and no more than there are
    batch = config.eval.batch or config.global_batch // (
        config.microbatches * (config.sync.local_steps or 1)
    )
    batch = min(batch, math.ceil(max(1, len(dataset.heldout)) / len(devices)) * len(devices))

    def init() -> TrainState:
        if config.init_from is not None:
            return step.init(*_imported(Path(config.init_from), _model_shapes(config, dataset)))
        key = jax.random.fold_in(jax.random.key(config.seed, impl="threefry2x32"), _INIT_FOLD)
        return step.init(*jax.jit(model.init)(key))

    def evaluate_heldout(state: TrainState, **more: Callable[[], None]) -> dict[str, float]:
        batches = eval_batches(dataset.heldout, batch, eval_step.rows(batch))
        params, model_state = state.params, state.model_state
        return evaluate(eval_step, params, model_state, batches, own_rows=True, **more)

    return Job(dataset, loader, mesh, loss_fn, step, make_step, eval_step, init, evaluate_heldout)

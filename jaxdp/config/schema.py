"""The configuration of a run: every key, its type, its range, its default and its meaning.

Three sections (`model`, `data`, `optimizer`) have a `kind` that decides which keys they hold:
`kinds.py`.  The rules that read several keys at once: `rules.py`.
"""

from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le
from pydantic import Field

from jaxdp.config.kinds import (
    Adam,
    BelowOne,
    Bytes,
    Count,
    CountOrZero,
    Data,
    Digits,
    Fraction,
    Mlp,
    Model,
    Optimizer,
    PathName,
    Positive,
    Section,
)

# Seeds that jax.random.key tells apart without 64-bit types.
MAX_SEED = 2**32 - 1
MAX_STEPS = 999_999_999  # names of checkpoints have nine digits, and JAX counts in int32

Algorithm = Literal[
    "psum",
    "ring",
    "bidirectional_ring",
    "recursive_doubling",
    "halving_doubling",
    "tree",
    "double_tree",
    "hierarchical",
    "naive",
    "all_gather_sum",
    "psum_scatter_gather",
    "all_to_all",
    "auto",
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
# Those that add nothing before it is decoded.
INT8_ALGORITHMS = ("psum", "all_to_all", "all_gather_sum")
# Those with a reduce-scatter and an all-gather.
HALVED_ALGORITHMS = (
    "psum", "ring", "bidirectional_ring", "halving_doubling", "hierarchical", "all_to_all",
)  # fmt: skip
# Those with an all-gather for any number of devices.
GATHER_ALGORITHMS = ("psum", "ring", "bidirectional_ring", "hierarchical", "all_to_all")


class Sync(Section):
    """How gradients are summed over devices."""

    algorithm: Algorithm = Field(
        default="psum",
        description="how gradients are summed over devices; auto: the fastest, chosen once",
    )
    tune: Literal["file", "start"] = Field(
        default="file",
        description="where auto looks: the file of compare --tune, or a measurement at the start",
    )
    tune_file: PathName | None = Field(
        default=None, description="the file of compare --tune; null: in the user's cache folder"
    )
    bucket_bytes: Bytes | None = Field(
        default=None,
        description="most gradient bytes of one reduction, last layers first; null: one reduction",
    )
    first_bucket_bytes: Bytes | None = Field(
        default=None,
        description="the same for the first reduction, which can start early; "
        "null: 1M, or sync.bucket_bytes if that is less",
    )
    peel_last: bool | None = Field(
        default=None,
        description="computes the last microbatch behind the loop over the others, so that buckets "
        "can travel during its backward pass; null: with buckets, but not on CPU, which does not "
        "overlap",
    )
    wire: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        default="float32",
        description="type of the gradients while they travel; loss sums and weights stay float32",
    )
    shard_optimizer: bool = Field(
        default=False,
        description="each device keeps and updates its share of the optimizer's state (ZeRO-1)",
    )
    compression: Literal["top_k", "power_sgd"] | None = Field(
        default=None,
        description="sends less than the gradients and keeps the rest for later steps: their "
        "largest elements, or low-rank factors of each matrix",
    )
    top_k_fraction: Fraction = Field(
        default=0.01,
        description="share of the gradient elements that each device sends; "
        "fewer bytes than without only below 1 / devices",
    )
    power_sgd_rank: Count = Field(
        default=4,
        description="rank of the factors; a leaf whose factors are not smaller travels whole",
    )
    local_steps: Count | None = Field(
        default=None,
        description="local SGD: optimizer steps that each device makes by itself in one step of "
        "the run, before the devices average; null: gradients are summed in every step",
    )
    outer_learning_rate: Positive = Field(
        default=1.0,
        description="with sync.local_steps: how far to go to the devices' average; DiLoCo: 0.7",
    )
    outer_momentum: BelowOne = Field(
        default=0.0,
        description="with sync.local_steps: Nesterov momentum of these averages; DiLoCo: 0.9",
    )
    logical_shards: Count | None = Field(
        default=None,
        description="parts, a power of two, whose sums are added in one tree: the same bits for "
        "1, 2, 4, .. devices up to as many; null: no such promise, and faster",
    )


class Checkpoint(Section):
    """When the state of the run is saved."""

    every: Literal["auto"] | CountOrZero = Field(
        default=0,
        description="steps between saves; 0: only at the end; auto: as often as costs the least "
        "time, by what a save is measured to cost and checkpoint.mean_time_to_failure",
    )
    keep: Count = Field(default=3, description="number of newest checkpoints that are kept")
    keep_best: Literal["loss", "accuracy"] | None = Field(
        default=None,
        description="also keep the checkpoint with the lowest loss, or the highest accuracy, on "
        "held-out data, evaluated when it was saved",
    )
    keep_every: Count | None = Field(
        default=None,
        description="also keep, for ever, the first checkpoint at or after each multiple of so "
        "many steps",
    )
    mean_time_to_failure: Annotated[float, Gt(0), Le(1_000_000)] = Field(
        default=24.0,
        description="hours between failures of the whole job, for checkpoint.every auto; of n "
        "machines, an nth of one machine's",
    )
    verify: Literal["fast", "thorough"] = Field(
        default="fast",
        description="fast: what is resumed has to be, by its files and its leaves, what was saved; "
        "thorough: each save is also read back before it counts, and a resume looks at all of them",
    )


class Eval(Section):
    """When the held-out examples are evaluated."""

    every: CountOrZero = Field(
        default=0, description="steps between evaluations; 0: only at the end"
    )
    batch: Count | None = Field(
        default=None,
        description="examples per evaluation batch, divisible by devices; null: as many as a part "
        "of a training step has, global_batch / microbatches / sync.local_steps",
    )


class Log(Section):
    """What the run tells while it runs."""

    every: Count = Field(default=10, description="steps between lines of metrics")
    progress: Literal["auto", "rich", "plain", "none"] = Field(
        default="auto", description="progress on the terminal; auto: rich if it is one, else plain"
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard files")


class Guard(Section):
    """What is done about replicas that differ and numbers that are not finite."""

    every: CountOrZero = Field(
        default=100, description="steps between comparisons of the replicas; 0: only at the start"
    )
    divergence: Literal["stop", "rollback"] = Field(
        default="stop",
        description="where replicas differ: stop, or go back to the newest checkpoint",
    )
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="where a loss, gradient or model state is not finite: stop; skip the "
        "step; or skip it, and after too many in a row go back to a checkpoint and leave out their "
        "batches",
    )
    limit: Count = Field(
        default=5,
        description="non-finite steps in a row that are skipped; one more is too many",
    )


class Config(Section):
    """The whole configuration of a run; the defaults alone are a valid one."""

    steps: Annotated[int, Ge(1), Le(MAX_STEPS)] = Field(
        default=1000, description="optimizer steps of the whole run"
    )
    seed: Annotated[int, Ge(0), Le(MAX_SEED)] = Field(
        default=0, description="seed of all randomness"
    )
    devices: Literal["auto"] | Count = Field(
        default="auto",
        description="devices over all processes, emulated on CPU; auto: all there are",
    )
    global_batch: Count = Field(
        default=96,
        description="examples per optimizer step over all devices; "
        "divisible by microbatches x devices, and these x sync.local_steps",
    )
    microbatches: Count = Field(
        default=1,
        description="parts in which each device works off its share of the batch, one by one",
    )
    compute_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="type of the computation; the parameters stay float32; "
        "float16: with a dynamic loss scale",
    )
    out: PathName | None = Field(
        default=None, description="folder of the run; null: runs/ and the name of the config file"
    )
    resume: bool | Literal["auto"] = Field(
        default=False, description="go on from the newest checkpoint in out; auto: if there is one"
    )
    init_from: PathName | None = Field(
        default=None,
        description="safetensors file of the parameters to begin with, as made by jaxdp.checkpoint "
        "export; null: they are drawn from the seed",
    )
    model: Model = Field(default=Mlp(), description="what is trained")
    data: Data = Field(default=Digits(), description="what it is trained on")
    optimizer: Optimizer = Field(default=Adam(), description="how the parameters are updated")
    sync: Sync = Field(default=Sync(), description="how the devices communicate")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="when the run is saved")
    eval: Eval = Field(default=Eval(), description="when held-out examples are evaluated")
    log: Log = Field(default=Log(), description="what the run tells")
    guard: Guard = Field(default=Guard(), description="what is done about wrong numbers")

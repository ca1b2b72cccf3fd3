r"""The reproducible training step: the same bits for every power of two of devices.

The global batch is cut into S logical shards, whatever the number of devices n.  A device computes
the sums of its S/n shards one by one; all S are added in one binary tree, of which the lower levels
are a device's own and the upper ones recursive doubling:

    shards   0   1   2   3   4   5   6   7        S = 8:     n = 1        n = 2        n = 4
              \ /     \ /     \ /     \ /
               +       +       +       +                    own          own          own
                \     /         \     /
                 +---+           +---+                      own          own          distance 1
                      \        /
                       +------+                             own          distance 1   distance 2

Additions of floats commute, though they do not associate: the same tree gives the same bits.  The
price: S/n sums are held at once, and each is computed from few examples.

Bitwise on CPUs of one kind with one number of cores; on GPUs only where operations are
deterministic and autotuning results are stored.

Reference: J. Demmel, H. D. Nguyen, "Parallel Reproducible Summation", IEEE Transactions on
Computers 64(7), 2015, on why the order of additions decides the bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.collectives import all_reduce
from jaxdp.collectives.execute import fence
from jaxdp.collectives.planning import planned_all_reduce
from jaxdp.freeze import combine, nothing
from jaxdp.gradients import shard_sums
from jaxdp.loss_path import checked_loss, without_collectives
from jaxdp.loss_scale import DynamicScale, unscaled
from jaxdp.mesh import AXIS, on_mesh
from jaxdp.plan import Plan
from jaxdp.sizes import powers_of_two
from jaxdp.state import TrainState
from jaxdp.steps.outcome import blank_state, check_options, checked_optimizer, loss_scaling, settled
from jaxdp.steps.pipeline import Pipeline
from jaxdp.steps.problem import Problem
from jaxdp.steps.shards import Shards, check_shards
from jaxdp.steps.types import Metrics, TrainStep
from jaxdp.steps.updates import replicated_update
from jaxdp.sync import GradSync, plan_buckets
from jaxdp.sync.buckets import join, part
from jaxdp.trees import shapes
from jaxdp.types import LossFn, PyTree

ALGORITHM = "recursive_doubling"
# what the update gets is summed already, by a program of its own
_SUMMED = GradSync(lambda params: (), lambda sums, state, axis_name: (sums, state))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A tree as one vector per dtype, so that a step handles few arrays.

    Attributes:
      vectors: the leaves joined, as `plan_buckets` orders them.
      like: the tree's shapes and dtypes, flattened, and its structure.
    """

    vectors: list[jax.Array]
    like: tuple[tuple[jax.ShapeDtypeStruct, ...], Any] = field(metadata={"static": True})


def pack(tree: PyTree) -> Packed:
    """Joins the leaves of each dtype."""
    leaves, structure = jax.tree.flatten(tree)
    vectors = [join([leaves[i] for i in bucket.leaves]) for bucket in plan_buckets(leaves)]
    return Packed(vectors, (tuple(shapes(leaves)), structure))


def unpack(packed: Packed) -> PyTree:
    """The inverse of `pack`."""
    like, structure = packed.like
    leaves: list[Any] = list(like)
    for bucket, vector in zip(plan_buckets(like), packed.vectors, strict=True):
        pieces = part(vector, [like[i] for i in bucket.leaves])
        for i, piece in zip(bucket.leaves, pieces, strict=True):
            leaves[i] = piece
    return jax.tree.unflatten(structure, leaves)


def tree_sum(terms: Sequence[jax.Array]) -> jax.Array:
    """Neighbours are added, then their sums: a power of two of terms, as devices go on with it."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=True)
        terms = [fence(a) + fence(b) for a, b in pairs]
    return terms[0]


def described(shards: int, platform: str) -> tuple[str, str]:
    """The algorithm, and what is promised of it."""
    numbers = ", ".join(map(str, powers_of_two(shards)))
    promise = f"reproducible: {shards} logical shards, the same bits for {numbers} devices"
    if platform != "cpu":
        promise += " (with deterministic operations and stored autotuning results)"
    return ALGORITHM, promise


def make_reproducible_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    logical_shards: int,
    microbatches: int = 1,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    seed: int = 0,
    learning_rate: Callable[[jax.Array], jax.Array] | None = None,
    loss_scale: DynamicScale | None = None,
    frozen: Callable[[PyTree], PyTree] = nothing,
) -> TrainStep:
    """Builds a training step whose result does not depend on the number of devices, to the bit.

    Args:
      loss_fn: as for `make_train_step`; sees one logical shard of one microbatch, and must not
        communicate.  Statistics of a batch are those of a logical shard.
      logical_shards: S, a power of two; the most devices that can take part.
      optimizer, mesh, microbatches, clip_norm, compute_dtype, seed, learning_rate, loss_scale,
        frozen: as for `make_train_step`.

    Returns:
      A `TrainStep` whose `run` is a `Pipeline`; the devices may be 1, 2, 4, .. S.

    Raises:
      UserError: an option is out of range, or the devices are not a power of two up to S.
    """
    check_options(microbatches, clip_norm, seed)
    check_shards(logical_shards, mesh.size)
    scaling = loss_scaling(compute_dtype, loss_scale)
    optimizer = checked_optimizer(optimizer)
    applied = replicated_update(optimizer, _SUMMED, AXIS, clip_norm)
    problem = Problem(checked_loss(without_collectives(loss_fn), compute_dtype), frozen, seed)

    def reads(state: TrainState) -> TrainState:
        return state._replace(
            skipped=(), nonfinite=(), nonfinite_run=(), opt_state=(), sync_state=()
        )

    def sums(state: TrainState, shards: Shards) -> Packed:
        number, batch = jax.tree.map(lambda x: x[0], shards)
        loss, trained, key = problem.at(state)
        found = shard_sums(loss, trained, state.model_state, batch, key, number, logical_shards)
        return jax.tree.map(lambda x: x[None], pack(unscaled(found, state.loss_scale)))

    def reduce(turns: Sequence[Packed]) -> Packed:
        def one(*terms: jax.Array) -> jax.Array:
            return all_reduce(tree_sum([x[0] for x in terms]), AXIS, algorithm=ALGORITHM)

        return jax.tree.map(one, *turns)

    def update(state: TrainState, total: Packed) -> tuple[TrainState, Metrics]:
        trained, fixed = problem.split(state.params)
        new = applied.apply(unpack(total), trained, state.opt_state, (), state.step)
        after = state._replace(
            params=combine(new.params, fixed), model_state=new.model_state, opt_state=new.opt_state
        )
        return settled(state, after, new.metrics, new.norm, scaling, learning_rate)

    def first_state(params: PyTree, model_state: PyTree) -> TrainState:
        opt_state = applied.init(mesh, problem.trained(params))
        return blank_state(
            mesh, scaling, params=params, model_state=model_state, opt_state=opt_state
        )

    def planned(state: TrainState, batch: Sequence[Shards]) -> Plan:
        packed = jax.eval_shape(sums, reads(state), batch[0])
        found = (
            planned_all_reduce(f"bucket {i}", ALGORITHM, x.size, x.dtype.itemsize, mesh.size)
            for i, x in enumerate(packed.vectors)
        )
        return Plan(tuple(one for group in found for one in group))

    run = Pipeline(
        mesh,
        reads,
        jax.jit(sums),
        jax.jit(on_mesh(reduce, mesh, (P(AXIS),), P())),
        jax.jit(update, donate_argnums=0),
    )
    return TrainStep(run, mesh, microbatches, first_state, planned, logical_shards=logical_shards)

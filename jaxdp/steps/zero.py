"""ZeRO-1: each device keeps the optimizer's state of its share of the parameters, and updates it.

    reduce-scatter the gradients, update 1/N of the parameters, all-gather the parameters

As many bytes as an all-reduce, and 1/N of the optimizer's memory and work.  Everything that is not
cut (loss, weights, model state, scalar leaves) and the shares' squares, for the global norm, travel
in one small all-reduce of the compiler's between the two halves.

Reference: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.gradients import clip, global_means
from jaxdp.mesh import AXIS, everywhere, replicate
from jaxdp.plan import Plan
from jaxdp.state import SavedForm, TrainState
from jaxdp.steps.elementwise import refuse_unless_elementwise
from jaxdp.steps.updates import Update, Updated
from jaxdp.sync import Sums, all_reduce_sync
from jaxdp.sync.sharded import ShardedSync, all_shares, my_shares, uncut
from jaxdp.sync.types import no_options
from jaxdp.trees import bytes_per_device, count_bytes
from jaxdp.types import PyTree

_exact = all_reduce_sync("psum")


def sharded_update(
    optimizer: optax.GradientTransformationExtraArgs,
    sync: ShardedSync,
    axis_name: str,
    clip_norm: float | None,
    trained: Callable[[PyTree], PyTree],
) -> Update:
    """Each device updates its share.

    Args:
      optimizer, axis_name, clip_norm: as for `replicated_update`.
      sync: the two halves of the reduction.
      trained: the state's parameters -> those that are trained.

    The optimizer has to be elementwise, and the algorithm there for this number of devices; `init`
    raises UserError where they are not.
    """

    def init(mesh: Mesh, params: PyTree) -> PyTree:
        # an algorithm may not be there for this number of devices
        sync.plan(params, params, mesh.size)
        refuse_unless_elementwise(optimizer, params)

        def shares(params: PyTree) -> PyTree:
            return optimizer.init(jax.tree.map(lambda x: all_shares(x, mesh.size), params))

        specs = _specs(jax.eval_shape(shares, params))
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        state = jax.jit(shares, out_shardings=placed)(replicate(mesh, params))
        _assert_shared(state, jax.eval_shape(optimizer.init, params), mesh)
        return state

    def apply(
        sums: Sums, params: PyTree, opt_state: PyTree, sync_state: PyTree, step: Any
    ) -> Updated:
        shares = sync.reduce_scatter(sums["grads"], axis_name)
        small, _ = _exact.update(_small_sums(sums, shares), (), axis_name)
        scalars, squares = small["grads"]["scalars"], small["grads"]["squares"]
        grads, model_state, metrics = global_means(small | {"grads": _replaced(shares, scalars)})
        divisor = jnp.where(metrics["weight"] > 0, metrics["weight"], 1)
        norm = jnp.sqrt(squares + _squares(scalars)) / divisor.astype(squares.dtype)
        if clip_norm is not None:
            grads = clip(grads, norm, clip_norm)
        mine = my_shares(params, axis_name)
        updates, opt_state = optimizer.update(grads, opt_state, mine, step=step)
        mine = optax.apply_updates(mine, updates)
        params = sync.all_gather(mine, params, axis_name)
        return Updated(params, model_state, opt_state, sync_state, metrics, norm)

    def plan(sums: Sums, params: PyTree, n: int) -> Plan:
        small = jax.eval_shape(_small_sums, sums, sums["grads"])
        assert _exact.plan is not None
        renamed = (one._replace(name="small sums") for one in _exact.plan(small, n).collectives)
        return sync.plan(sums["grads"], params, n) + Plan(tuple(renamed))

    return Update(
        init=init,
        specs=_specs,
        apply=apply,
        sync_init=lambda params: (),
        plan=plan,
        compiler_options=no_options,
        form=_saved_form(optimizer, trained),
    )


def _small_sums(sums: Sums, shares: PyTree) -> Sums:
    """What is reduced whole: all but the gradients' shares, and the sum of their squares."""
    leaves = jax.tree.leaves(shares)
    grads = {
        "scalars": [leaf for leaf in leaves if not leaf.ndim],
        "squares": _squares([leaf for leaf in leaves if leaf.ndim]),
    }
    return sums | {"grads": grads}


def _squares(leaves: list[jax.Array]) -> jax.Array:
    """The sum of all elements' squares, in float32 or wider."""
    dtype = jnp.result_type(jnp.float32, *leaves)
    return sum((jnp.sum(jnp.square(leaf.astype(dtype))) for leaf in leaves), jnp.zeros((), dtype))


def _replaced(tree: PyTree, scalars: list[jax.Array]) -> PyTree:
    """`tree` with these in the places of its scalar leaves."""
    new = iter(scalars)
    return jax.tree.map(lambda leaf: leaf if leaf.ndim else next(new), tree)


def _specs(opt_state: PyTree) -> PyTree:
    """Shares are spread over the devices; scalars, such as counts, are whole on each."""
    return jax.tree.map(lambda x: P(AXIS) if x.ndim else P(), opt_state)


def _assert_shared(opt_state: PyTree, whole: PyTree, mesh: Mesh) -> None:
    """Measures that no device holds more than its share, with the padding."""
    padding = sum(leaf.dtype.itemsize for leaf in jax.tree.leaves(whole))
    most, allowed = bytes_per_device(opt_state), count_bytes(whole) / mesh.size + padding
    if most > allowed:
        raise AssertionError(
            f"the optimizer's state takes {most} bytes of a device; at most {allowed:.0f} were due"
        )


def _saved_form(
    optimizer: optax.GradientTransformationExtraArgs, trained: Callable[[PyTree], PyTree]
) -> SavedForm:
    """The state as the plain update has it, so that either goes on from the other's checkpoint."""

    def whole(state: TrainState) -> PyTree:
        return jax.eval_shape(optimizer.init, trained(state.params))

    def saved(state: TrainState) -> TrainState:
        # leaf by leaf on the host: no device has room for the whole state to be taken for granted
        return state._replace(opt_state=jax.tree.map(_gathered, state.opt_state, whole(state)))

    def like(state: TrainState) -> TrainState:
        def spread(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state.step.sharding)

        return state._replace(opt_state=jax.tree.map(spread, whole(state)))

    def restored(found: TrainState, like: TrainState) -> TrainState:
        return found._replace(opt_state=jax.tree.map(_spread, found.opt_state, like.opt_state))

    return SavedForm(saved, like, restored)


def _gathered(leaf: jax.Array, whole: jax.ShapeDtypeStruct) -> Any:
    if not leaf.ndim:
        return leaf
    assert isinstance(leaf.sharding, NamedSharding)
    assert isinstance(leaf.sharding.mesh, Mesh)
    return uncut(jax.device_get(everywhere(leaf.sharding.mesh, leaf)), whole.shape)


def _spread(leaf: jax.Array, like: Any) -> jax.Array:
    n = like.sharding.mesh.size
    # a program, not `device_put`: processes hold parts of both
    return jax.jit(lambda x: all_shares(x, n), out_shardings=like.sharding)(leaf)

"""How the devices' sums become new parameters: every device all of it, or each its share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.gradients import clip, global_means
from jaxdp.mesh import replicate
from jaxdp.plan import Plan
from jaxdp.state import AS_IT_IS, SavedForm
from jaxdp.sync import GradSync, Sums
from jaxdp.types import PyTree


class Updated(NamedTuple):
    """What an update makes.

    Attributes:
      params, model_state, opt_state, sync_state: the new ones.
      metrics: name -> mean over the global batch, with "weight".
      norm: float scalar, of the reduced gradient before clipping.
    """

    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    sync_state: PyTree
    metrics: dict[str, jax.Array]
    norm: jax.Array


class Update(NamedTuple):
    """Pure functions.

    Attributes:
      init: (mesh, trained parameters) -> the optimizer's state, placed.
      specs: that state -> how it is spread over the mesh, for `shard_map`.
      apply: (this device's sums, trained parameters, opt_state, sync_state, step) -> `Updated`;
        inside `shard_map`.
      sync_init: trained parameters -> one device's state of the synchronisation.
      plan: (sums and trained parameters as shapes, devices) -> the collectives of `apply`; None
        where nobody stated them.
      compiler_options: platform -> what XLA needs to be told for the plan to hold.
      form: how the state is kept in checkpoints.
      takes_order: whether `apply` and `plan` take the keyword `order`, as `GradSync` has it.
    """

    init: Callable[[Mesh, PyTree], PyTree]
    specs: Callable[[PyTree], PyTree]
    apply: Callable[..., Updated]
    sync_init: Callable[[PyTree], PyTree]
    plan: Callable[..., Plan] | None
    compiler_options: Callable[[str], Mapping[str, str]]
    form: SavedForm = AS_IT_IS
    takes_order: bool = False


def replicated_update(
    optimizer: optax.GradientTransformationExtraArgs,
    sync: GradSync,
    axis_name: str,
    clip_norm: float | None,
) -> Update:
    """Every device gets all sums and makes the whole update itself."""

    def apply(
        sums: Sums,
        params: PyTree,
        opt_state: PyTree,
        sync_state: PyTree,
        step: Any,
        **options: Any,
    ) -> Updated:
        sums, sync_state = sync.update(sums, sync_state, axis_name, **options)
        grads, model_state, metrics = global_means(sums)
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads = clip(grads, norm, clip_norm)
        updates, opt_state = optimizer.update(grads, opt_state, params, step=step)
        params = optax.apply_updates(params, updates)
        return Updated(params, model_state, opt_state, sync_state, metrics, norm)

    def plan(sums: Sums, params: PyTree, n: int, **options: Any) -> Plan:
        assert sync.plan is not None
        return sync.plan(sums, n, **options)

    return Update(
        init=lambda mesh, params: replicate(mesh, optimizer.init(params)),
        specs=lambda opt_state: P(),
        apply=apply,
        sync_init=sync.init,
        plan=plan if sync.plan else None,
        compiler_options=sync.compiler_options,
        takes_order=sync.takes_order,
        form=AS_IT_IS._replace(respread=sync.respread),
    )

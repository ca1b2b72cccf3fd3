"""The last microbatch behind the loop: the same training, in which buckets are ready one by one."""

import jax
import numpy as np
import pytest

from jaxdp import all_reduce_sync, hlo
from jaxdp.errors import UserError
from jaxdp.loss_path import inner_jaxprs
from jaxdp.plan import as_planned, compare
from jaxdp.steps import data_parallel


def buckets(algorithm="ring"):
    return all_reduce_sync(algorithm, bucket_bytes=1200, first_bucket_bytes=300)


def loops(jaxpr):
    """Lengths of the scans of a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for inner in inner_jaxprs(eqn):
            yield from loops(inner)


@pytest.mark.parametrize(("n", "microbatches", "algorithm"), [(1, 4, "psum"), (3, 2, "ring")])
def test_law_1_it_is_the_loop_over_all(n, microbatches, algorithm, begun, batches, params):
    """Every sum, and the model state that goes from microbatch to microbatch."""
    with jax.enable_x64(True):
        given, start, ends = batches(4, np.float64), params(np.float64), []
        for peel_last in (False, True):
            options = {"microbatches": microbatches, "peel_last": peel_last}
            step, state = begun(buckets(algorithm), n, start, **options)
            for batch in given:
                state, metrics = step(state, step.place(batch))
            ends.append(jax.device_get((state.params, state.model_state, metrics)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12), *ends)
        for leaf in jax.tree.leaves((state.params, state.model_state)):
            assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1


def test_buckets_are_those_of_one_microbatch_and_outside_of_the_loop(begun, batches, params):
    plans = {}
    [batch] = batches(1)
    for microbatches, peel_last in ((1, False), (4, False), (4, True)):
        options = {"microbatches": microbatches, "peel_last": peel_last}
        step, state = begun(buckets(), 2, params(), **options)
        placed = step.place(batch)
        plans[microbatches, peel_last] = plan = step.plan(state, placed)
        if peel_last:
            found = hlo.collectives(step.run.lower(state, placed).compile().as_text())
            assert as_planned(plan, found), compare(plan, found)
            assert not any(collective.in_loop for collective in found)
    assert plans[4, True] == plans[1, False]
    assert plans[4, True] != plans[4, False]  # after a loop, all gradients are there at once


@pytest.mark.parametrize(
    ("platform_overlaps", "sync", "asked", "peeled"),
    [
        (False, buckets(), None, False),
        (True, buckets(), None, True),
        (True, buckets(), False, False),
        (True, all_reduce_sync("ring"), None, False),
        (False, all_reduce_sync("ring"), True, True),
    ],
)
def test_when_it_is(platform_overlaps, sync, asked, peeled, begun, batches, params, monkeypatch):
    monkeypatch.setattr(data_parallel, "overlaps", lambda platform: platform_overlaps)
    [batch] = batches(1)
    for microbatches in (4, 1) if not asked else (4,):
        step, state = begun(sync, 2, params(), microbatches=microbatches, peel_last=asked)
        jaxpr = step.run.trace(state, step.place(batch)).jaxpr.jaxpr
        expected = {1: [], 4: [3 if peeled else 4]}[microbatches]
        assert [length for length in loops(jaxpr) if length in (3, 4)] == expected
        assert step.peeled == (peeled and microbatches > 1)


def test_it_is_not_so_on_cpu(begun, params):
    step, _ = begun(buckets(), 2, params(), microbatches=4)
    assert not step.peeled


def test_nothing_to_peel(begun, params):
    with pytest.raises(UserError, match="peel_last: True has no effect with microbatches 1"):
        begun(buckets(), 2, params(), peel_last=True)

"""Buckets: what the planner promises, and that compiled steps hold it."""

import itertools
import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import all_reduce_sync, hlo, plan_buckets
from jaxdp.errors import UserError
from jaxdp.plan import as_planned, compare
from jaxdp.sync.buckets import FIRST_BYTES, add_riders, join, part

ALGORITHMS = ("psum", "ring", "recursive_doubling", "tree")


def random_tree(rng, dtypes=(np.float32, jnp.bfloat16, np.float64)):
    sizes = rng.integers(0, 400, rng.integers(1, 40)) ** 2
    return [jax.ShapeDtypeStruct((int(k),), rng.choice(dtypes)) for k in sizes]


@pytest.mark.parametrize("trial", range(20))
def test_the_planner_keeps_its_promises(trial, rng):
    leaves = random_tree(rng)
    cap = int(rng.integers(1, 400_000))
    first = int(rng.integers(1, cap + 1))
    buckets = plan_buckets(leaves, cap, first)
    numbers = [i for bucket in buckets for i in bucket.leaves]
    assert sorted(numbers) == list(range(len(leaves)))
    seen = set()
    for bucket in buckets:
        assert list(bucket.leaves) == sorted(bucket.leaves, reverse=True)
        assert {jnp.dtype(leaves[i].dtype) for i in bucket.leaves} == {bucket.dtype}
        nbytes = [leaves[i].size * bucket.dtype.itemsize for i in bucket.leaves]
        limit = cap if bucket.dtype in seen else first
        assert sum(nbytes) <= limit or sum(nbytes[1:]) == 0, "a larger leaf is alone"
        seen.add(bucket.dtype)
    for dtype in seen:  # in reverse order throughout, and no bucket is closed too early
        mine = [bucket.leaves for bucket in buckets if bucket.dtype == dtype]
        assert sum(mine, ()) == tuple(sorted(sum(mine, ()), reverse=True))
        for k, (a, b) in enumerate(pairwise(mine)):
            held = sum(leaves[i].size for i in (*a, b[0])) * dtype.itemsize
            assert held > (cap if k else first)
    last = [bucket.leaves[-1] for bucket in buckets]
    assert last == sorted(last, reverse=True), "the bucket that is complete first goes first"


def test_defaults(rng):
    leaves = [jax.ShapeDtypeStruct((1 << 17,), np.float32)] * 80  # 512 KiB each
    assert [len(b.leaves) for b in plan_buckets(leaves)] == [80]
    assert [len(b.leaves) for b in plan_buckets(leaves, 25 << 20)] == [2, 50, 28]
    assert FIRST_BYTES == 2 * 4 << 17
    assert [len(b.leaves) for b in plan_buckets(leaves, 512 << 10)] == [1] * 80
    assert plan_buckets({}) == ()


def test_riders_travel_with_the_first_bucket_of_their_dtype():
    shapes = [((9,), jnp.bfloat16), ((9,), np.float32), ((9,), np.float32), ((2,), np.float32)]
    leaves = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    buckets = add_riders(plan_buckets(leaves[:3], 36, 36), leaves, [3])
    assert [bucket.leaves for bucket in buckets] == [(2, 3), (1,), (0,)]
    alone = add_riders(plan_buckets(leaves[:1]), leaves, [3])
    assert [bucket.leaves for bucket in alone] == [(3,), (0,)]


def test_joined_and_parted_is_the_same(rng):
    leaves = [rng.normal(size=shape) for shape in ((3, 2), (), (0, 4), (5,))]
    for a, b in zip(leaves, part(join(list(map(jnp.asarray, leaves))), leaves), strict=True):
        np.testing.assert_array_equal(np.float32(a), b)


def test_law_3_found_is_planned(compiled, params, batches, few):
    cuts = ((None, None, 1), (2000, 600, 4), (4000, None, 2))
    cases = itertools.product((1, 2, 3, 4, 8), ALGORITHMS, (1, 4), cuts)
    for n, algorithm, microbatches, (cap, first, count) in few(cases, 12):
        sync = all_reduce_sync(algorithm, bucket_bytes=cap, first_bucket_bytes=first)
        [batch] = batches(1)
        plan, text = compiled(sync, n, params(), batch, microbatches=microbatches)
        found = hlo.collectives(text)
        assert as_planned(plan, found), compare(plan, found)
        assert microbatches == 1 or " while(" in text  # there is a loop to be in
        if n > 1 or algorithm == "psum":
            assert plan.names == tuple(f"bucket {k}" for k in range(count))


@pytest.mark.parametrize("algorithm", ["psum", "ring", "recursive_doubling"])
def test_law_1_with_buckets(algorithm, trained, params, batches, few):
    start, stream = params(), batches(20)
    one, rows = trained(all_reduce_sync(), 1, start, stream)
    for n in few((2, 3, 4, 8), 1):
        sync = all_reduce_sync(algorithm, bucket_bytes=2000, first_bucket_bytes=600)
        many, more = trained(sync, n, start, stream)
        for name, p in one.params.items():
            difference = np.linalg.norm(np.asarray(p) - np.asarray(many.params[name]))
            assert difference / np.linalg.norm(p) <= 5e-6, (n, name)
        for a, b in zip(rows, more, strict=True):
            assert a == pytest.approx(b, rel=2e-5)


@pytest.mark.parametrize("algorithm", ["psum", "ring"])
def test_law_1_with_buckets_in_x64(algorithm, trained, params, batches, few):
    with jax.enable_x64(True):
        start, stream = params(np.float64), batches(20, np.float64)
        one, _ = trained(all_reduce_sync(), 1, start, stream, microbatches=4)
        sync = all_reduce_sync(algorithm, bucket_bytes=4000, first_bucket_bytes=600)
        for n in few((2, 3, 4, 8), 1):
            many, _ = trained(sync, n, start, stream, microbatches=4)
            for name, p in one.params.items():
                p, q = np.asarray(p), np.asarray(many.params[name])
                assert np.linalg.norm(p - q) / np.linalg.norm(p - start[name]) <= 1e-12, (n, name)


def test_the_cpu_merges_buckets_unless_it_is_told_not_to(compiled, params, batches):
    """Once this fails the compiler has changed, and `NO_COMBINER` can be measured anew."""
    sync = all_reduce_sync(bucket_bytes=2000, first_bucket_bytes=600)
    sync = sync._replace(compiler_options=lambda platform: {})
    [batch] = batches(1)
    plan, text = compiled(sync, 4, params(), batch)
    found = hlo.collectives(text)
    assert len(plan.names) > len(found) == 1
    assert compare(plan, found).endswith("the compiler merged them")


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_get_a_key_per_bucket_and_no_copy(platform, begun, params, batches):
    sync = all_reduce_sync(bucket_bytes=2000, first_bucket_bytes=600)
    step, state = begun(sync, 2, params())
    batch = step.place(batches(1)[0])
    text = step.run.trace(state, batch).lower(lowering_platforms=(platform,)).as_text()
    leaves = len(jax.tree.leaves(state.params)) + 1 + 2  # model state; loss, accuracy
    assert text.count('"stablehlo.all_reduce"') == leaves
    ends = [line for line in text.splitlines() if line.strip().startswith("}) {mhlo.frontend")]
    assert len(ends) == leaves
    for name in step.plan(state, batch).names:
        assert any(f'combiner_key = "{name}"' in line for line in ends)
    joined_sizes = re.findall(r"concatenate.* -> tensor<(\d+)xf32>", text)
    assert set(joined_sizes) == {"2"}  # pairs of scalars
    assert sync.compiler_options(platform) == {}


def test_mistakes_are_one_line():
    for options, words in (
        ({"bucket_bytes": 0}, "bucket_bytes: 0; expected at least 1"),
        ({"first_bucket_bytes": 5}, "5 with bucket_bytes None"),
        ({"bucket_bytes": 4, "first_bucket_bytes": 5}, "no more than bucket_bytes"),
    ):
        with pytest.raises(UserError, match=words) as error:
            all_reduce_sync(**options)
        assert len(error.value.lines) == 1

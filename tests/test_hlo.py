"""Reading compiled programs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdp import hlo, on_mesh
from jaxdp.mesh import AXIS


def compiled(mesh, body, *args):
    return jax.jit(on_mesh(body, mesh, P(AXIS), P(AXIS))).lower(*args).compile().as_text()


def test_kinds_sizes_and_pairs(mesh_of):
    def body(x):
        y = lax.ppermute(x, AXIS, [(0, 1), (1, 2)])
        return lax.psum(y * 2, AXIS)

    permute, reduce = hlo.collectives(compiled(mesh_of(3), body, np.ones((3, 5, 7), np.float32)))
    assert (permute.kind, permute.result_bytes) == ("collective-permute", 5 * 7 * 4)
    assert permute.pairs == ((0, 1), (1, 2))
    assert (reduce.kind, reduce.result_bytes, reduce.in_loop) == ("all-reduce", 5 * 7 * 4, False)


def test_a_collective_in_a_loop_is_seen(mesh_of):
    def body(x):
        # the loop's input changes, so that the reduction cannot be moved out of it
        return lax.fori_loop(0, 5, lambda i, c: lax.psum(jnp.sin(c), AXIS), x)

    [found] = hlo.collectives(compiled(mesh_of(2), body, np.ones((2, 3), np.float32)))
    assert found.in_loop


def test_programs_one_after_the_other_are_read_apart():
    looped, plain = (
        """HloModule one
body.1 (x: f32[2]) -> f32[2] {
  ROOT %n = f32[2]{0} negate(%x)
}
ENTRY main (x: f32[2]) -> f32[2] {
  ROOT %w = f32[2]{0} while(%x), condition=cond.1, body=body.1
}
""",
        """HloModule two
ENTRY body.1 (x: f32[2]) -> f32[2] {
  ROOT %r = f32[2]{0} all-reduce(%x), to_apply=add
}
""",
    )
    [found] = hlo.collectives(looped + plain)
    assert (found.kind, found.in_loop) == ("all-reduce", False)


def test_asynchronous_forms_of_other_targets():
    text = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %s = (f32[8], f32[8], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %d = f32[8]{0} collective-permute-done(%s)
  %a = (bf16[4,2]{1,0}, f32[]) all-reduce-start(%d, %c), to_apply=%add
  ROOT %r = f32[8]{0} all-reduce-done(%a)
}
"""
    permute, reduce = hlo.collectives(text)
    assert (permute.result_bytes, permute.pairs) == (32, ((0, 1), (1, 0)))
    assert reduce.result_bytes == 4 * 2 * 2 + 4
    assert (
        hlo.describe([permute, permute, reduce])
        == "2 collective-permutes, 64 B; 1 all-reduce, 20 B"
    )
    looped = replace(permute, in_loop=True)
    assert hlo.summary([permute, looped, permute, reduce]) == [
        {"kind": "collective-permute", "in_loop": False, "count": 2, "result_bytes": 64},
        {"kind": "collective-permute", "in_loop": True, "count": 1, "result_bytes": 32},
        {"kind": "all-reduce", "in_loop": False, "count": 1, "result_bytes": 20},
    ]

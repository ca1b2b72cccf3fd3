"""Two processes that talk over Gloo: the reduce-scatter that was wrong, and our way round it."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import jax
import jaxlib
import numpy as np
import pytest

from jaxdp.collectives import reduce_scatter
from jaxdp.collectives.builtin import psum_scatter_is_wrong
from jaxdp.mesh import AXIS

OLD = tuple(int(part) for part in jaxlib.__version__.split(".")[:2]) < (0, 12)

# 16 MiB chunks, where jaxlib 0.10's psum_scatter was wrong in one call of twelve
PROGRAM = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
rank = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, rank, coordinator_bind_address=sys.argv[2])
from jaxdp import on_mesh, data_mesh, reduce_scatter
from jaxdp.mesh import AXIS

mesh = data_mesh(jax.devices())
chunk = 1 << 22
run = jax.jit(on_mesh(lambda x: reduce_scatter(x[0], AXIS)[None], mesh, P(AXIS), P(AXIS)))
rng = np.random.default_rng(7)
for _ in range(8):
    both = rng.integers(-999, 999, (2, 2 * chunk)).astype(np.float32)
    placed = jax.make_array_from_process_local_data(NamedSharding(mesh, P(AXIS)), both[rank:][:1])
    part = np.asarray(run(placed).addressable_shards[0].data)[0]
    assert (part == both.sum(0)[rank * chunk :][:chunk]).all()
text = run.lower(placed).compile().as_text()
assert ("reduce-scatter" in text) != ("collective-permute" in text)
print("permute" if "collective-permute" in text else "psum_scatter", flush=True)
"""


def test_reduce_scatter_over_gloo_is_right_on_this_version():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    with ExitStack() as stack:
        processes = []
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(rank), address],
                env=environment | {"JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err[-2000:]
            # Gloo prints a line of its own
            assert out.split()[-1] == ("permute" if OLD else "psum_scatter")


@pytest.mark.parametrize(
    ("platform", "processes", "version", "wrong"),
    [
        ("cpu", 2, "0.10.2", True),
        ("cpu", 2, "0.11.9", True),
        ("cpu", 2, "0.12.0.1", False),
        ("cpu", 2, "1.0.0", False),
        ("cpu", 1, "0.10.2", False),
        ("gpu", 2, "0.10.2", False),
    ],
)
def test_where_psum_scatter_is_wrong(platform, processes, version, wrong):
    assert psum_scatter_is_wrong(platform, processes, version) == wrong


def test_the_way_round_gives_the_same_numbers(on_ranks, rng, monkeypatch):
    x = rng.integers(-9, 9, (3, 6, 2)).astype(np.float32)
    builtin = on_ranks(lambda row: reduce_scatter(row, AXIS), x)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jaxlib, "__version__", "0.10.2")
    np.testing.assert_array_equal(on_ranks(lambda row: reduce_scatter(row, AXIS), x), builtin)

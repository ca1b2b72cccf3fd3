"""What the compiled program sends and copies, read from its text and not from the schedule."""

import re
from collections import Counter
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxdp import hlo
from jaxdp.collectives import (
    Result,
    algorithms_for,
    all_gather,
    all_reduce,
    broadcast,
    make_schedule,
    reduce_scatter,
    traffic,
)
from jaxdp.mesh import AXIS

COLLECTIVES: dict[Result, Callable] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
}
CASES = [(result, a) for result in COLLECTIVES for a in algorithms_for(result, scheduled=True)]
STATIC = ["ring", "bidirectional_ring", "halving_doubling", "hierarchical"]

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]*)\]\S* ([\w\-]+)\(")


def large_instructions(text, size):
    """How many instructions of each kind have a result of at least `size` elements."""
    found = (_INSTRUCTION.match(line) for line in text.splitlines())
    return Counter(
        match[2]
        for match in found
        if match and np.prod([int(d) for d in match[1].split(",") if d], initial=1) >= size
    )


@pytest.mark.parametrize(("result", "algorithm"), CASES)
def test_permutes_and_bytes_are_those_of_the_cost_model(result, algorithm, jitted, few):
    powers_only = algorithm == "halving_doubling" and result != "all_reduce"
    for n in few([2, 4, 8] if powers_only else range(2, 10), 2):
        schedule = make_schedule(algorithm, result, n)
        # not a multiple of the chunks, except where it must be: the padding travels too
        size = 12 * n * schedule.chunks if result in ("reduce_scatter", "all_gather") else 1001
        x = np.zeros((n, size // n if result == "all_gather" else size), np.float32)
        run = jitted(
            n, lambda row, algorithm=algorithm: COLLECTIVES[result](row, AXIS, algorithm=algorithm)
        )
        permutes = hlo.collectives(run.lower(x).compile().as_text())
        assert {permute.kind for permute in permutes} == {"collective-permute"}
        sent = Counter()
        for permute in permutes:
            for source, _ in permute.pairs:
                sent[source] += permute.result_bytes
        expected = traffic(schedule, size * 4)
        assert len(permutes) == expected.permutes
        assert sum(len(permute.pairs) for permute in permutes) == expected.messages
        assert tuple(sent[rank] for rank in range(n)) == expected.sent_bytes


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("algorithm", STATIC)
def test_nothing_is_copied_but_what_travels(algorithm, n, jitted):
    chunks, chunk = make_schedule(algorithm, "all_reduce", n).chunks, 1000
    run = jitted(n, lambda row: all_reduce(row, AXIS, algorithm=algorithm))
    x = np.zeros((n, chunks * chunk), np.float32)
    found = large_instructions(run.lower(x).compile().as_text(), chunk)
    assert found["dynamic-slice"] <= chunks  # cut at the beginning
    assert found["dynamic-update-slice"] <= chunks  # and joined at the end
    assert not found.keys() & {"copy", "gather", "scatter", "select"}


def test_the_program_grows_linearly():
    def equations(n):
        run = jax.vmap(lambda row: all_reduce(row, AXIS, algorithm="ring"), axis_name=AXIS)
        return len(jax.make_jaxpr(run)(np.zeros((n, n), np.float32)).eqns)

    assert equations(64) <= 8 * equations(8)


def test_a_copy_would_be_seen():
    text = "  %copy.1 = f32[4,250]{1,0} copy(%p)\n  ROOT %x = f32[999]{0} copy(%y)\n"
    assert large_instructions(text, 1000) == {"copy": 1}

"""The cost model against the closed forms of Thakur, Rabenseifner and Gropp (2005)."""

from math import ceil, log2

import pytest

from jaxdp.collectives import ALGORITHMS, Links, Result, make_schedule, predict_s, traffic

ALPHA, BETA, GAMMA = 3e-6, 7e-10, 2e-10
LINKS = Links(ALPHA, BETA, GAMMA)
M = 2 * 3 * 4 * 5 * 7 * 8 * 9 * 16 * 4  # bytes that all chunk counts here divide


def time(algorithm, n, links=LINKS, result: Result = "all_reduce", **options):
    return predict_s(make_schedule(algorithm, result, n, **options), M, links)


@pytest.mark.parametrize("p", range(1, 10))
def test_closed_forms_for_any_number_of_ranks(p):
    both = 2 * (p - 1) * ALPHA + 2 * (p - 1) / p * M * BETA + (p - 1) / p * M * GAMMA
    assert time("ring", p) == pytest.approx(both)
    half = (p - 1) * ALPHA + (p - 1) / p * M * BETA
    assert time("ring", p, result="all_gather") == pytest.approx(half)
    assert time("ring", p, result="reduce_scatter") == pytest.approx(half + (p - 1) / p * M * GAMMA)
    levels = ceil(log2(p))
    assert time("tree", p) == pytest.approx(levels * (2 * ALPHA + 2 * M * BETA + M * GAMMA))
    assert time("tree", p, result="broadcast", root=p - 1) == pytest.approx(
        levels * (ALPHA + M * BETA)
    )
    assert time("naive", p) == pytest.approx((p - 1) * (2 * ALPHA + 2 * M * BETA + M * GAMMA))


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_closed_forms_for_powers_of_two(p):
    exchange = ALPHA + M * BETA + M * GAMMA
    assert time("recursive_doubling", p) == pytest.approx(log2(p) * exchange)
    share = (p - 1) / p * M
    rabenseifner = 2 * log2(p) * ALPHA + 2 * share * BETA + share * GAMMA
    assert time("halving_doubling", p) == pytest.approx(rabenseifner)


@pytest.mark.parametrize("n", [3, 5, 6, 7, 9])
def test_folding_costs_two_rounds_of_the_whole_vector(n):
    p = 4 if n < 8 else 8
    folds = 2 * (ALPHA + M * BETA) + M * GAMMA
    for algorithm in ("recursive_doubling", "halving_doubling"):
        assert time(algorithm, n) == pytest.approx(time(algorithm, 2 if n == 3 else p) + folds)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_two_ports_let_the_bidirectional_ring_use_both_links(n):
    two_ports = Links(ALPHA, BETA, GAMMA, ports=2)
    wire, add = 2 * (n - 1) / n * M * BETA, (n - 1) / n * M * GAMMA
    rounds = 2 * (n - 1) * ALPHA
    assert time("bidirectional_ring", n) == pytest.approx(2 * rounds + wire + add)
    assert time("bidirectional_ring", n, two_ports) == pytest.approx(rounds + wire / 2 + add)
    assert time("ring", n, two_ports) == pytest.approx(time("ring", n))


@pytest.mark.parametrize("n", [4, 7, 8, 16, 33, 64])
def test_the_double_tree_reaches_the_rings_bandwidth_in_fewer_rounds(n):
    schedule = make_schedule("double_tree", "all_reduce", n, segments=64)
    found = traffic(schedule, 64 * M)
    assert max(found.sent_bytes) <= 2 * 64 * M
    assert max(len(transfers) for transfers in schedule.rounds) == 1
    beta_only = predict_s(schedule, 64 * M, Links(0, BETA))
    assert 2 * 64 * M * BETA * (1 - 1 / n) <= beta_only <= 2 * 64 * M * BETA * 1.15
    if n >= 16:
        assert traffic(make_schedule("double_tree", "all_reduce", n), M).rounds < 2 * (n - 1)


def test_bytes_between_nodes():
    n, local_size = 8, 4

    def inter(algorithm, **options):
        schedule = make_schedule(algorithm, "all_reduce", n, **options)
        return traffic(schedule, M, local_size=local_size).max_inter_bytes

    assert inter("hierarchical", local_size=local_size) == 2 * (2 - 1) * M // n
    assert inter("ring") == 2 * (n - 1) * M // n
    assert inter("recursive_doubling") == M
    assert traffic(make_schedule("ring", "all_reduce", n), M).max_inter_bytes == 0


def test_slower_links_between_nodes_favour_two_levels():
    n, L, G = 8, 4, 2
    slow = Links(ALPHA, BETA, GAMMA, local_size=L, alpha_inter=10 * ALPHA, beta_inter=20 * BETA)
    inside = 2 * (L - 1) * (ALPHA + M / L * BETA) + (L - 1) * M / L * GAMMA
    between = 2 * (G - 1) * (10 * ALPHA + M / n * 20 * BETA) + (G - 1) * M / n * GAMMA
    two_levels = time("hierarchical", n, slow, local_size=L)
    assert two_levels == pytest.approx(inside + between)
    assert two_levels < time("ring", n, slow) / 2
    assert time("ring", n, Links(ALPHA, BETA, GAMMA, local_size=L)) == time("ring", n)


def test_counts_and_padding():
    found = traffic(make_schedule("ring", "all_reduce", 4), 4 * 1001, itemsize=4)
    chunk_bytes = 251 * 4  # 1001 elements in 4 chunks
    assert (found.rounds, found.permutes, found.messages) == (6, 6, 24)
    assert found.sent_bytes == (6 * chunk_bytes,) * 4
    assert found.reduced_bytes == (3 * chunk_bytes,) * 4
    assert found.max_sent_bytes == 6 * chunk_bytes
    tree = traffic(make_schedule("tree", "all_reduce", 4), 4 * 1001)
    assert tree.sent_bytes == (2 * 4004, 4004, 2 * 4004, 4004)


def test_one_rank_costs_nothing():
    for algorithm, row in ALGORITHMS.items():
        for result in row.schedules:
            schedule = make_schedule(algorithm, result, 1)
            assert predict_s(schedule, M, LINKS) == 0
            assert traffic(schedule, M).messages == 0

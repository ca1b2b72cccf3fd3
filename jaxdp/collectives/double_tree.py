r"""The double binary tree: two trees carry half of the vector each, segment after segment.

    tree 0 of 8 ranks:  0            tree 1, its mirror image:            7
                        |                                                 |
                        4                                                 3
                       / \                                               / \
                     2     6                                           5     1
                    / \   / \                                         / \   / \
                   1   3 5   7                                       6   4 2   0

A rank that is a leaf in one tree is an inner rank of the other, so all ranks send about as much as
in a ring, in O(lg n) rounds.  The edges have two colours: no rank sends, or receives, along two
edges of one colour.  A beat is two rounds, one per colour.  With depth d of the edge's lower end,
D the greatest depth, S segments per tree:

    reduce, beat u:     along every edge, upwards, segment u - (D - d), added
    broadcast, beat u:  along every edge, downwards, segment S - 1 - (u - (d - 1)), kept

2 (S + D - 1) beats of 1 / 2 S of the vector.  The broadcast takes the segments in reverse, so that
a rank at depth d keeps segment k of a tree at slot (k - d) mod S in both phases, and only the tree
has to be looked up by rank.

Reference: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35(12), 2009; S. Jeaugey, "Massively Scale Your Deep
Learning Training with NCCL 2.4", NVIDIA developer blog, 2019 (these trees).
"""

from collections import defaultdict
from typing import NamedTuple

from jaxdp.collectives.schedule import Round, Schedule, transfer
from jaxdp.errors import UserError


class _Edge(NamedTuple):
    tree: int
    child: int
    parent: int
    depth: int  # of the child
    colour: int


def all_reduce(n: int, *, segments: int = 4) -> Schedule:
    """Reduce to the two roots, then broadcast from them; up to 4 (segments + D - 1) rounds.

    Args:
      n: number of ranks.
      segments: into how many pieces each half of the vector is cut.  Many for long vectors: the
        pipeline's filling costs (D - 1) / segments of the bandwidth; few for short ones.

    Raises:
      UserError: `segments` is less than 1.
    """
    if segments < 1:
        raise UserError(f"double_tree: segments={segments}; expected at least 1")
    parents = _parents(n)
    edges = _coloured(parents)
    slot = tuple(
        tuple(
            # the tree in which it is an inner rank first
            (tree ^ (r in parents[1].values())) * segments
            + (k - _depth(parents[tree], r)) % segments
            for tree in (0, 1)
            for k in range(segments)
        )
        for r in range(n)
    )
    rounds = _rounds(edges, segments, up=True) + _rounds(edges, segments, up=False)
    return Schedule(n, 2 * segments, rounds, slot, "all_reduce")


def _rounds(edges: list[_Edge], segments: int, *, up: bool) -> tuple[Round, ...]:
    deepest = max((edge.depth for edge in edges), default=0)
    rounds: list[Round] = []
    for beat in range(segments + deepest - 1):
        for colour in (0, 1):
            moves = []
            for edge in edges:
                count = beat - (deepest - edge.depth if up else edge.depth - 1)
                if edge.colour != colour or not 0 <= count < segments:
                    continue
                ends = (edge.child, edge.parent) if up else (edge.parent, edge.child)
                chunk = edge.tree * segments + (count if up else segments - 1 - count)
                moves.append((*ends, [chunk]))
            if moves:
                rounds.append((transfer(moves, reduce=up),))
    return tuple(rounds)


def _parents(n: int) -> tuple[dict[int, int], dict[int, int]]:
    """For both trees: child -> parent; the root is nobody's child."""
    first = {}
    for r in range(1, n):
        bit = r & -r  # the lowest bit set: 1 for leaves, 2 one level up, ...
        parent = r ^ bit | bit << 1
        first[r] = parent if parent < n else r ^ bit
    if n % 2 == 0:
        return first, {n - 1 - r: n - 1 - parent for r, parent in first.items()}
    return first, {(r + 1) % n: (parent + 1) % n for r, parent in first.items()}


def _depth(parent: dict[int, int], rank: int) -> int:
    return 1 + _depth(parent, parent[rank]) if rank in parent else 0


def _coloured(parents: tuple[dict[int, int], dict[int, int]]) -> list[_Edge]:
    """The edges of both trees, in colours 0 and 1.

    A rank has at most two parents and two children, counted over both trees.  So the edges form
    paths and even cycles, in which an edge's neighbours share its child or its parent: alternate.
    """
    edges = [(tree, r, up) for tree in (0, 1) for r, up in parents[tree].items()]
    sharing = defaultdict(list)
    for edge in edges:
        for end in (("child", edge[1]), ("parent", edge[2])):
            sharing[end].append(edge)
    colour: dict[tuple[int, int, int], int] = {}
    for first in edges:
        todo = [(first, 0)]
        while todo:
            edge, wanted = todo.pop()
            if edge not in colour:
                colour[edge] = wanted
                neighbours = sharing["child", edge[1]] + sharing["parent", edge[2]]
                todo += [(other, 1 - wanted) for other in neighbours]
    return [_Edge(*edge, _depth(parents[edge[0]], edge[1]), colour[edge]) for edge in edges]

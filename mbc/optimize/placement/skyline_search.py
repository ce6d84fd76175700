"""Skyline search: a depth-first search for a placement within a limit, complete if it ends before its limit of nodes.

Blocks are placed bottom-up, always into the narrowest gap of the skyline, a segment between two higher ones. Up to the
lower of its walls only blocks that live within a gap can be placed there, so that few can come first at its edge, and
columns before that one are wasted. Each column may waste the limit less its live bytes, its slack: where the slack
allows no block at an edge, the branch is dead (`mbc.optimize.placement.skyline_state`).

A dead end is explained by the columns that it depends on. Decisions that changed none of these are undone at once
(conflict-directed backjumping: Prosser, "Hybrid algorithms for the constraint satisfaction problem", 1993), and a state
that failed is not entered again. Restarts prefer other blocks (Gomes, Selman, Kautz, "Boosting combinatorial search
through randomization", 1998).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from mbc.optimize import effort
from mbc.optimize.placement.skyline_state import Columns, Option, Packing, State, hull, with_walls
from mbc.optimize.schedule.liveness import Block


def search(blocks: Sequence[Block], limit_bytes: int, most_nodes: int) -> list[int] | None:
    """Return offsets of the blocks within `limit_bytes`, or None if the first `most_nodes` nodes have no solution.

    The search is seeded and counted in nodes, never in seconds, so that equal blocks get equal offsets.
    """
    if not blocks:
        return []
    if _longest_descent(most_nodes) < len(blocks):  # each node places at most one block
        return None
    tree = _Tree(Packing(blocks, limit_bytes))
    draw = random.Random(0)
    promotion, nodes = 1.0, float(effort.SKYLINE_SEARCH_RESTART_NODES)
    for exponent in cycle(effort.SKYLINE_SEARCH_LIFE_EXPONENTS):
        if most_nodes <= 0 or tree.exhausted:
            return None
        ranks = [life**exponent * draw.uniform(1.0, promotion) for life in tree.packing.lives]
        offsets = tree.descend(ranks, min(int(nodes), most_nodes))
        if offsets is not None:
            return offsets
        most_nodes -= int(nodes)
        promotion = effort.SKYLINE_SEARCH_PROMOTION
        nodes *= effort.SKYLINE_SEARCH_RESTART_GROWTH
    return None


def _longest_descent(most_nodes: int) -> int:
    """Return the most nodes between two restarts of a search of `most_nodes` nodes."""
    longest, nodes = 0, float(effort.SKYLINE_SEARCH_RESTART_NODES)
    while most_nodes > 0:
        longest = max(longest, min(int(nodes), most_nodes))
        most_nodes -= int(nodes)
        nodes *= effort.SKYLINE_SEARCH_RESTART_GROWTH
    return longest


@dataclass(slots=True)
class _Node:
    """A state of the search, and the options that are left for its next gap.

    Attributes:
        state: The state.
        segment: The gap that is filled next.
        options: Options that are left, the best last.
        conflict: Columns that the failures of the options before depend on.
        touched: Columns that the present option changed.
    """

    state: State
    segment: int
    options: list[Option]
    conflict: Columns
    touched: Columns = (0, 0)


class _Tree:
    """The search tree of one limit.

    Attributes:
        packing: The blocks and the limit.
        failed: The columns that the failures of states depended on, by state, kept from one descent to the next.
        exhausted: Whether there is no placement.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.failed: dict[int, Columns] = {}
        self.exhausted = False

    def descend(self, ranks: Sequence[float], most_nodes: int) -> list[int] | None:
        """Return offsets from a depth-first search over at most `most_nodes` nodes, blocks of high rank first."""
        packing = self.packing
        state, conflict = packing.empty()
        stack = [self._node(state, ranks)] if conflict is None else []
        offsets = [0] * len(packing.order)
        for _ in range(most_nodes):
            if not stack:
                self.exhausted = True
                break
            node = stack[-1]
            option = node.options.pop()
            if option.block is not None:
                offsets[packing.order[option.block]] = node.state.heights[node.segment]
            state, node.touched, conflict = packing.decided(node.state, node.segment, option)
            if conflict is None and not state.left:
                return offsets
            conflict = conflict or self.failed.get(state.key)
            if conflict is None:
                stack.append(self._node(state, ranks))
            else:
                self._backjump(stack, conflict)
        return None

    def _backjump(self, stack: list[_Node], conflict: Columns) -> None:
        """Go back to the last node that has another option and whose present option is a reason of the conflict."""
        while stack:
            node = stack[-1]
            if node.touched[0] < conflict[1] and conflict[0] < node.touched[1]:
                node.conflict = conflict = hull(hull(node.conflict, conflict), with_walls(node.touched))
                if node.options:
                    return
            self.failed[node.state.key] = conflict
            stack.pop()

    def _node(self, state: State, ranks: Sequence[float]) -> _Node:
        packing = self.packing
        begin, (end, options) = min(state.gaps.items(), key=lambda gap: (gap[1][0] - gap[0], gap[0]))
        segment = state.segment(begin)
        depth = packing.depth(state, segment)

        def promise(option: Option) -> float:
            if option.block is None:
                return 0.0
            size = packing.sizes[option.block]
            area = size * packing.lives[option.block]
            flush = effort.SKYLINE_SEARCH_FLUSH_PROMOTION if size == depth else 1.0
            return ranks[option.block] * flush * area / (area + effort.SKYLINE_SEARCH_WASTE_AVERSION * option.area)

        return _Node(state, segment, sorted(options, key=promise), with_walls((begin, end)))

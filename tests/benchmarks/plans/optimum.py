"""The best contiguous placement of blocks, by a dynamic program that shares nothing with devmap's partitioner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy


class Optimum:
    """The smallest highest load / budget over all ways to cut blocks into one run for each device; weights alone.

    `best(budgets)[i]` is that of the first i blocks on those devices, in any order of them: the last of the devices
    gets the blocks from j on, for the best j. Devices of equal budgets are alike, so that a multiset of budgets is what
    is remembered.
    """

    def __init__(self, weights_bytes: Sequence[int]) -> None:
        self._ends = numpy.concatenate(([0], numpy.cumsum(numpy.array(weights_bytes, dtype=numpy.int64))))
        loads = self._ends[:, None] - self._ends[None, :]
        self._loads = numpy.where(loads < 0, numpy.inf, loads)  # row i, column j: what blocks j to i - 1 take
        self._known: dict[tuple[int, ...], numpy.ndarray] = {}

    def in_any_order(self, budgets: Sequence[int], num_blocks: int = -1) -> float:
        """The optimum over all orders of the devices; above 1 where no contiguous placement fits.

        Of the first `num_blocks` alone, where they are given.
        """
        return float(self._best(tuple(sorted(budgets)))[num_blocks])

    def in_this_order(self, budgets: Sequence[int], num_blocks: int = -1) -> float:
        """The optimum with devices in the order of `budgets`."""
        best = self._nothing()
        for budget in budgets:
            best = self._with_one_more(best, budget)
        return float(best[num_blocks])

    def reach_in_any_order(self, budgets: Sequence[int]) -> int:
        """How many of the first blocks fit."""
        return int(numpy.flatnonzero(self._best(tuple(sorted(budgets))) <= 1)[-1])

    def _nothing(self) -> numpy.ndarray:
        return numpy.concatenate(([0.0], numpy.full(len(self._ends) - 1, numpy.inf)))

    def _best(self, budgets: tuple[int, ...]) -> numpy.ndarray:
        if not budgets:
            return self._nothing()
        if budgets not in self._known:
            tries = []
            for index, budget in enumerate(budgets):
                if index == 0 or budget != budgets[index - 1]:
                    before = self._best(budgets[:index] + budgets[index + 1 :])
                    tries.append(self._with_one_more(before, budget))
            self._known[budgets] = numpy.minimum.reduce(tries)
        return self._known[budgets]

    def _with_one_more(self, best: numpy.ndarray, budget: int) -> numpy.ndarray:
        return numpy.asarray(numpy.maximum(best[None, :], self._loads / budget).min(axis=1))

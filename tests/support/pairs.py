"""Parametrizing by pairs: any two values of two parameters meet in a test, and the other combinations are slow."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Return the mark for these parameters and their values: every combination, most of them for `make test-slow`."""
    every = list(product(*(range(len(each)) for each in values.values())))
    chosen = _chosen(every)
    rows = []
    for combination in every:
        row = [each[i] for each, i in zip(values.values(), combination, strict=True)]
        marks = () if combination in chosen else pytest.mark.slow
        rows.append(pytest.param(*row, id="-".join(map(_name, row)), marks=marks))
    return pytest.mark.parametrize(list(values), rows)


def _chosen(every: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return combinations with every pair of values, at each step the first of those with the most new pairs."""
    missing = set().union(*map(_pairs, every))
    chosen = set()
    while missing:
        best = max(every, key=lambda combination: len(_pairs(combination) & missing))
        missing -= _pairs(best)
        chosen.add(best)
    return chosen


def _pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(combinations(enumerate(combination), 2))


def _name(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)

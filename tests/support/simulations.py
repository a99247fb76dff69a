"""How many simulations a rate is taken from: few in `make test`, all in `make test-slow`."""

import math

import pytest


def counts(few: int, every: int) -> pytest.MarkDecorator:
    """Run a test with `count=few`, and under `slow` with `count=every`."""
    return pytest.mark.parametrize("count", [few, slow(every)])


def slow(*values: object) -> object:
    """Return a case that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def most(share: float, count: int) -> float:
    """Return a share and two standard deviations of what is seen of it in `count` simulations."""
    return share + 2 * math.sqrt(share * (1 - share) / count)

"""How many simulations a rate is taken from: few in `make test`, all in `make test-slow`."""

import math
from statistics import NormalDist

import pytest


def counts(few: int, every: int) -> pytest.MarkDecorator:
    """Run a test with `count=few`, and under `slow` with `count=every`."""
    return pytest.mark.parametrize("count", [few, slow(every)])


def slow(*values: object) -> object:
    """Return a case that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def most(share: float, count: int, draws: int = 1) -> float:
    """Return a share and two standard deviations of what is seen of it in `count` simulations.

    Of several `draws` the largest is still within as often as one is within two (C. E. Bonferroni).
    """
    deviations = 2.0 if draws == 1 else NormalDist().inv_cdf(1.0 - NormalDist().cdf(-2.0) / draws)
    return share + deviations * math.sqrt(share * (1 - share) / count)

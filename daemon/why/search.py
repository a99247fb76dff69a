"""Finds the difference between two environments that changes a time, by bisection of a measured effect; pure.

The differences from A to B form a chain, and each prefix of it can be installed. The times at both ends of the chain
are known; between two ends that differ, the prefix in the middle is measured until it equals one of them or is clearly
neither. This is dd (A. Zeller, R. Hildebrandt, IEEE TSE 28, 2002) with a noisy effect instead of pass and fail: about
log2 n comparisons per cause. Each cause is then applied to A alone in fresh processes, because a cause selected for its
large effect looks larger than it is; a cause that has no effect on its own acts together with a partner.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from msgspec import Struct

from benchd.daemon.verdicts.effects import as_share, mean_and_variance
from benchd.daemon.verdicts.statistics import Interval, student_t_quantile

ERROR = 0.0025
"""The error rate of a comparison; the eight or so comparisons of a search together have one of 2 %."""

FEWEST_PAIRS = 3
MOST_PAIRS = 15
NEAR, APART = 0.35, 0.1
"""Shares of the distance between two ends: a point farther than APART from both is neither, otherwise one closer than
NEAR is the end.
"""

Applied = Set[str]


class Estimate(Struct, frozen=True):
    """A mean log ratio to A, its standard error, and the degrees of freedom of the latter."""

    log_ratio: float
    error: float
    degrees: float

    @property
    def reach(self) -> float:
        """Half the width of the interval, which is wrong in a share `ERROR` of all cases."""
        return student_t_quantile(1.0 - ERROR / 2.0, self.degrees) * self.error

    @property
    def share(self) -> float:
        """The time divided by A's, minus 1."""
        return as_share(self.log_ratio)

    @property
    def interval(self) -> Interval:
        """The interval of `share`."""
        return Interval(as_share(self.log_ratio - self.reach), as_share(self.log_ratio + self.reach))

    @property
    def is_effect(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.log_ratio) > self.reach


Measure = Callable[[Applied, float, float], Estimate | None]
"""Compares A with some differences applied to plain A; returns None if that mixture cannot run the case.

The two numbers are the log ratios to decide between: the comparison ends once it can distinguish them.
"""


class Cause(Struct, frozen=True):
    """Differences that together change the time, and their cost when only they are applied to A."""

    names: tuple[str, ...]
    cost: Estimate


class Causes(Struct, frozen=True):
    """The result of a search: the causes, and alternatives, each of which has the same effect.

    `unresolved` are differences that include the cause, which noise or mixtures that do not run hide.
    """

    causes: list[Cause] = []
    alternatives: list[Cause] = []
    unresolved: tuple[str, ...] = ()


@dataclass
class Spread:
    """The variance of one pair's log ratio, pooled over the comparisons of a search."""

    squares: float = 0.0
    degrees: int = 0

    def of(self, logs: Sequence[float]) -> Estimate:
        """Return the mean of at least two log ratios, with a standard error pooled over previous comparisons."""
        centre, variance = mean_and_variance(logs)
        degrees = self.degrees + len(logs) - 1
        pooled = (self.squares + variance * (len(logs) - 1)) / degrees
        return Estimate(centre, math.sqrt(pooled / len(logs)), degrees)

    def add(self, logs: Sequence[float]) -> None:
        """Add a finished comparison."""
        if len(logs) > 1:
            self.squares += mean_and_variance(logs)[1] * (len(logs) - 1)
            self.degrees += len(logs) - 1


def placed(estimate: Estimate, low: float, high: float, pairs: int = MOST_PAIRS) -> float | None:
    """Return `low` or `high` if the estimate matches it, the estimate if it is clearly neither, None if undecided.

    After the last pair, return the end that is within the interval, if the other end is outside it.
    """
    if pairs < FEWEST_PAIRS:
        return None
    span = abs(high - low)
    off = {end: abs(estimate.log_ratio - end) for end in (low, high)}
    if min(off.values()) - estimate.reach > APART * span and estimate.reach < NEAR * span:
        return estimate.log_ratio
    for end, distance in off.items():
        if distance + estimate.reach < NEAR * span:
            return end
    inside = [end for end, distance in off.items() if distance <= estimate.reach]
    if pairs < MOST_PAIRS or len(inside) == 2:
        return None
    return inside[0] if inside else estimate.log_ratio


class _Unclear(Exception):
    """The differences between two ends cannot be distinguished; contains their names."""


def _explains(fewer: Cause, more: Cause) -> bool:
    """Return whether `fewer` has the same cost as `more` with only some of the differences."""
    apart = abs(fewer.cost.log_ratio - more.cost.log_ratio)
    return {*fewer.names} < {*more.names} and apart <= fewer.cost.reach + more.cost.reach


@dataclass
class Search:
    """The search through a `chain` of differences, each after those that it needs; effects below `least` are ignored.

    `needs` gives, for each difference, the others without which it cannot be installed.
    """

    chain: Sequence[str]
    measure: Measure
    least: float
    needs: Mapping[str, Applied] = field(default_factory=dict)

    def run(self, whole: float) -> Causes:
        """Return the causes of B's log ratio to A."""
        try:
            causes = self._causes(self.chain, whole)
            return Causes(causes, self._alternatives(causes, whole))
        except _Unclear as unclear:
            return Causes(unresolved=unclear.args)

    def _closed(self, names: Applied) -> frozenset[str]:
        return frozenset(names).union(*(self.needs.get(name, ()) for name in names))

    def _causes(self, chain: Sequence[str], log_ratio: float) -> list[Cause]:
        steps = list(self._steps(frozenset(), chain, 0.0, log_ratio))
        by_itself = {names: high - low for names, low, high in steps}
        causes: dict[frozenset[str], Cause] = {}
        for names, low, high in steps:
            earlier = chain[: chain.index(names[0])]
            cause = self._complete(frozenset(names), earlier, low, high, by_itself)
            if cause.cost.is_effect:
                causes[frozenset(cause.names)] = cause
        return [cause for cause in causes.values() if not any(_explains(other, cause) for other in causes.values())]

    def _steps(
        self, base: Applied, chain: Sequence[str], low: float, high: float
    ) -> Iterator[tuple[tuple[str, ...], float, float]]:
        """Yield the differences at which the time changes along a chain added to `base`, with the log ratios."""
        if abs(high - low) < self.least:
            return
        splits = sorted(range(1, len(chain)), key=lambda split: abs(2 * split - len(chain)))
        for split in splits:
            estimate = self.measure(self._closed({*base, *chain[:split]}), low, high)
            if estimate is not None:
                break
        else:  # a single difference, or several that only run together
            yield tuple(chain), low, high
            return
        between = self._placed(estimate, low, high, chain)
        yield from self._steps(base, chain[:split], low, between)
        yield from self._steps({*base, *chain[:split]}, chain[split:], between, high)

    def _placed(self, estimate: Estimate, low: float, high: float, names: Sequence[str]) -> float:
        value = placed(estimate, low, high)
        if value is None:
            raise _Unclear(*names)
        return value

    def _complete(
        self,
        names: frozenset[str],
        earlier: Sequence[str],
        low: float,
        high: float,
        by_itself: Mapping[tuple[str, ...], float],
    ) -> Cause:
        """Apply a step alone, then add earlier differences as partners, until it costs as much as it did after them."""
        step = high - low
        while True:
            estimate = self.measure(self._closed(names), 0.0, step)
            if estimate is None:
                raise _Unclear(*names)
            alone = self._placed(estimate, 0.0, step, sorted(names))
            rest = [name for name in earlier if name not in self._closed(names)]
            if alone or not rest:
                return Cause(tuple(name for name in self.chain if name in names), estimate)
            steps = self._steps(self._closed(names), rest, alone, high)
            partners = (
                step_names
                for step_names, before, after in steps
                if abs(after - before - by_itself.get(step_names, 0.0)) >= NEAR * abs(step)
            )
            partner = next(partners, None)
            if partner is None:
                return Cause(tuple(name for name in self.chain if name in names), estimate)
            names |= frozenset(partner)

    def _alternatives(self, causes: Sequence[Cause], log_ratio: float) -> list[Cause]:
        """Return the causes among the other differences, if these alone cost as much as all differences."""
        guilty = {name for cause in causes for name in cause.names}
        rest = [name for name in self.chain if not self._closed({name}) & guilty]
        if not causes or not rest:
            return []
        estimate = self.measure(self._closed(set(rest)), 0.0, log_ratio)
        without = 0.0 if estimate is None else self._placed(estimate, 0.0, log_ratio, rest)
        return self._causes(rest, without) if abs(without) >= self.least else []

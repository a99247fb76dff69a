"""Computes how much slower results must be on three days to raise an alarm, so that false alarms are rare; pure.

All results of a case are compared with the same pinned runs, so an unlucky baseline raises false alarms for as long as
it is pinned. The bound is therefore a tolerance bound: the budget is the expected share of installations that raise a
false alarm in a month, averaged over the pinned runs that they may have. tests/daemon/verdicts/test_alarms.py checks
it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from statistics import fmean

from msgspec import Struct

from benchd.daemon.records import Record
from benchd.daemon.trigger import DAY_S, MONTH_S
from benchd.daemon.verdicts import when
from benchd.daemon.verdicts.effects import RUNS_APART, mean_and_variance
from benchd.daemon.verdicts.results import process_medians_ms

SLOWER_DAYS = 3
"""How many SLOWER results, each at least a day after the previous one, raise an alarm: a weekend has only two days."""

LEAST_CHANGE = 2.5 * RUNS_APART
"""The smallest log ratio that counts, 8.3 %, however similar the pinned runs are: all may come from a single boot."""

FEWEST_APART = 5
"""Fewer pinned runs might all be at the same level by chance, and their bound would be tens of standard deviations."""

DAILY = MONTH_S / DAY_S
"""The number of results per month that is assumed for a case without a schedule."""

_SPREADS = [math.exp(step / 10) for step in range(-90, 15)]  # deviations of the pinned runs, divided by the true one
_CENTRES = [step / 2 for step in range(-8, 9)]  # centres of the pinned runs, in standard errors


class Budget(Struct, frozen=True):
    """The accepted number of false alarms per month across all cases, and the results per month of each case."""

    false_alarms_per_month: float
    results_per_month: Mapping[str, float]

    def __str__(self) -> str:
        cases, results = len(self.results_per_month), math.fsum(self.results_per_month.values())
        share = f"{self.false_alarms_per_month:g} false alarms per month"
        return f"Expected: at most {share}, in {results:,.0f} results of {cases} case{'s' * (cases != 1)}."

    def bound(self, case_id: str, centres: Sequence[float]) -> float:
        """Return the log ratio beyond which a result of the case counts as slower or faster, at least `LEAST_CHANGE`.

        `centres` are the means of the log times of at least FEWEST_APART pinned runs. The budget is divided by the
        number of cases (Bonferroni).
        """
        chance = -math.expm1(-self.false_alarms_per_month / max(len(self.results_per_month), 1))
        _, variance = mean_and_variance(centres)
        factor = _factor(len(centres), chance, self.results_per_month.get(case_id, DAILY))
        return max(factor * math.sqrt(variance), LEAST_CHANGE)


@cache
def _factor(runs: int, chance: float, results: float) -> float:
    """Return the bound, in estimated standard deviations, at which `results` results raise an alarm with `chance`.

    An alarm takes `SLOWER_DAYS` independent results beyond the bound. Its probability is averaged over the possible
    centres and deviations of the pinned runs, with which all results of an installation are compared.
    """
    weights = {
        (spread, centre / math.sqrt(runs)): math.exp((runs - 1) * (math.log(spread) - spread**2 / 2) - centre**2 / 2)
        for spread, centre in product(_SPREADS, _CENTRES)
    }
    total = math.fsum(weights.values())

    def alarms(factor: float) -> float:
        return -math.fsum(
            weight / total * math.expm1(-results * _upper_tail(factor * spread + centre) ** SLOWER_DAYS)
            for (spread, centre), weight in weights.items()
        )

    low, high = 0.0, 1.0
    while alarms(high) > chance:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if alarms(middle) > chance else (low, middle)
    return high


def _upper_tail(deviations: float) -> float:
    return math.erfc(deviations / math.sqrt(2.0)) / 2.0


def apart(pinned: Sequence[Record]) -> list[Record]:
    """Return the first pinned run of each day, oldest first; all runs are of one case."""
    measured = sorted((run for run in pinned if process_medians_ms([run])), key=lambda record: record.t_wall)
    day_of = when.days(measured)
    return list({day_of[record.key]: record for record in reversed(measured)}.values())[::-1]


def least_change(budget: Budget, pinned: Sequence[Record], processes: int | None = None) -> float | None:
    """Return the log ratio beyond which a result from `processes` processes counts; None with too few separate runs.

    Runs half a day apart count as separate. At most this many processes of each pinned run are used, because the mean
    of more would vary less than the result.
    """
    runs = [process_medians_ms([record])[:processes] for record in apart(pinned)]
    if len(runs) < FEWEST_APART:
        return None
    centres = [fmean(map(math.log, times_ms)) for times_ms in runs]
    return budget.bound(pinned[0].case_id, centres)


def too_few(pinned: Sequence[Record]) -> str:
    """Return how many more pinned runs a case needs before it can raise an alarm, and how to pin them."""
    return (
        f"the baseline has {len(apart(pinned))} of the {FEWEST_APART} runs, half a day apart, that an alarm needs: pin "
        "runs from several days with benchd baseline set RUN..."
    )

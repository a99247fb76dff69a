"""How often one of several equal variants is named the one to ship, through the complete decision.

The rates are those of docs/measuring.md; a bound of 5 % is held with two deviations more.
"""

import msgspec
import numpy as np
import pytest
from records_made import PASSED, made, timing
from simulations import counts, most

from benchd.daemon.records import Case, ProcessResult, all_variants
from benchd.daemon.verdicts.recommend import Requirements, decide
from benchd.daemon.verdicts.statistics import combine

BARE = made(check=PASSED)
VARIANTS = [variant for variant in all_variants() if variant.kernels == "torch"][:8]


def record(variant, times_ms):
    """Return the record of a case with these process medians, each with its own narrow interval."""
    timings = [timing(time_ms, low_ms=time_ms * 0.9995, high_ms=time_ms * 1.0005) for time_ms in times_ms]
    centre_ms, interval = combine(times_ms)
    case = Case(model="vim_tiny", variant=variant)
    return msgspec.structs.replace(
        BARE,
        case=case,
        case_id=case.case_id,
        timing=timing(centre_ms, low_ms=interval.low, high_ms=interval.high) if interval else timings[0],
        processes=[ProcessResult(status="ok", timing=one) for one in timings],
    )


def decisions(equal, processes, lead=0.0, slower=0, *, count):
    """Decide among so many equal variants, the first faster by `lead`, and others that are 1.5 times as slow."""
    rng = np.random.default_rng(equal * processes)
    times = 5.0 * np.exp(0.003 * rng.standard_normal((count, equal + slower, processes)))
    times[:, 0] *= 1.0 - lead
    times[:, equal:] *= 1.5
    for one in times.tolist():
        (decision,) = decide([record(*found) for found in zip(VARIANTS, one, strict=False)], Requirements())
        yield decision


@pytest.mark.parametrize("processes", [3, 5])
@pytest.mark.parametrize(("equal", "slower"), [(2, 0), (2, 2), (3, 0), (8, 0)])
@counts(400, 800)
def test_of_equal_variants_one_is_rarely_named(count, equal, slower, processes):
    named = [decision.ship is not None for decision in decisions(equal, processes, slower=slower, count=count)]
    assert np.mean(named) <= most(0.05, count)


def test_of_one_process_nothing_ships_however_far_apart():
    found = list(decisions(2, 1, count=200))
    assert not any(decision.ship for decision in found)
    assert sum(decision.fastest is not None for decision in found) > 100


def test_a_variant_that_is_two_percent_faster_ships_and_the_interval_covers_its_lead():
    found = list(decisions(2, 5, lead=0.02, count=800))
    assert np.mean([decision.ship == "eager" for decision in found]) > 0.95
    covered = [one.ratio_interval.low <= 1.0 / 0.98 <= one.ratio_interval.high for one in found]
    assert 0.93 <= np.mean(covered) <= 0.98

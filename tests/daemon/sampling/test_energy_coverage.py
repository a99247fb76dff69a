"""How often the energy's bar covers the truth, by load or fault and by sensor: the table of docs/evidence.md.

`pytest -s -m slow tests/daemon/sampling/test_energy_coverage.py` prints its cells. A run counts as missed if it has an
energy whose bar misses the truth; at most 7 % may, and each bound below allows two standard deviations more.
"""

import math
import random
import sys
from statistics import median

import msgspec
import pytest
from simulated_power import Load, Sensor, held, span
from simulations import most

from benchd.daemon.sampling import energy

MISSED = 0.07
WINDOWS_S = (2.0, 3.7, 5.0, 10.0)
READS_S = (0.02, 0.05, 0.05)  # the sampler's default is 0.05 s


def levels(rng):
    """Return a low and a high power in W."""
    low_w = rng.uniform(5.0, 30.0)
    return low_w, low_w * rng.uniform(1.2, 4.0)


def steady(rng, window_s, guard_s):
    watts = rng.uniform(5.0, 60.0)
    return held(window_s, lambda i: watts, 1.0, 0.5, guard_s)


def square(slowest_hz, fastest_hz):
    def make(rng, window_s, guard_s):
        low_w, high_w = levels(rng)
        half_s = 0.5 / rng.uniform(slowest_hz, fastest_hz)
        return held(window_s, lambda i: (low_w, high_w)[i % 2], half_s, rng.random(), guard_s)

    return make


def bursts(sparsest, densest):
    """Return a maker of bursts of 3 to 30 ms that take such a share of the time, at regular times or at any."""

    def make(rng, window_s, guard_s):
        low_w, high_w = levels(rng)
        burst_s = rng.uniform(0.003, 0.03)
        pause_s = burst_s * (1 / rng.uniform(sparsest, densest) - 1)
        regular = rng.random() < 0.5
        steps, t = [(-100.0, 4.0)], -guard_s - rng.random() * (burst_s + pause_s)
        while t < window_s + guard_s:
            steps += [(t, high_w), (t + burst_s, low_w)]
            t += burst_s + (pause_s if regular else rng.expovariate(1 / pause_s))
        return Load([*steps, (max(t, steps[-1][0]), 4.0)])

    return make


def ramps(rng, window_s, guard_s):
    low_w, high_w = levels(rng)
    period_s, step_s = window_s * rng.choice([0.1, 0.3, 1.0, 2.0]), 0.002
    steps = round(period_s / step_s)
    begin = rng.randrange(steps)
    return held(
        window_s, lambda i: low_w + (high_w - low_w) * ((i + begin) % steps) / steps, step_s, rng.random(), guard_s
    )


def mixed(rng, window_s, guard_s):
    return rng.choice([steady, square(1.0, 15.0), bursts(0.1, 0.5), ramps])(rng, window_s, guard_s)


def value(of):
    """Return a fault that makes one update's value `of(value, the value before)`."""

    def fault(rng, samples, inside, _):
        return one_wrong(rng, samples, rng.choice(inside), of)

    return fault


def one_wrong(rng, samples, first, of):
    """Return the samples with another value from `first` on, in this reading or in all of its update."""
    last = first
    if rng.random() < 0.5:  # in the sensor, so that every reading of the update has it
        while last + 1 < len(samples) and samples[last + 1].value == samples[first].value:
            last += 1
    before = samples[first - 1].value
    return [
        msgspec.structs.replace(each, value=of(each.value, before)) if first <= i <= last else each
        for i, each in enumerate(samples)
    ]


def values(count, factor_of):
    """Return a fault of so many updates, often in a row, each its value times `factor_of(rng)`."""

    def fault(rng, samples, inside, _):
        updates = [i for i in inside if samples[i].value != samples[i - 1].value]
        place = rng.randrange(len(updates) - count)
        wrong = updates[place : place + count] if rng.random() < 0.3 else rng.sample(updates, count)
        for first in wrong:
            factor = factor_of(rng)
            samples = one_wrong(rng, samples, first, lambda now, before, factor=factor: factor * now)
        return samples

    return fault


def stuck(rng, samples, inside, period_s):
    first = rng.choice(inside)
    end_ns = samples[first].t_ns + rng.uniform(1.0, 20.0) * period_s * 1e9
    return [
        msgspec.structs.replace(each, value=samples[first].value) if i > first and each.t_ns < end_ns else each
        for i, each in enumerate(samples)
    ]


def reset(smallest, largest):
    """Return a fault that lets a counter fall by so many of its mean updates."""

    def fault(rng, samples, inside, _):
        at = rng.choice(inside)
        update_j = (samples[inside[-1]].value - samples[inside[0]].value) / (len(inside) - 1)
        lost_j = update_j * smallest * (largest / smallest) ** rng.random()
        return [
            msgspec.structs.replace(each, value=each.value - lost_j) if i >= at else each
            for i, each in enumerate(samples)
        ]

    return fault


def resets(count, smallest, largest):
    def fault(rng, samples, inside, period_s):
        for _ in range(count):
            samples = reset(smallest, largest)(rng, samples, inside, period_s)
        return samples

    return fault


def none(rng, samples, inside, period_s):
    return samples


POWERS = {
    "20 ms point": {"period_s": 0.02},
    "20 ms averaging": {"period_s": 0.02, "averages": True},
    "100 ms point": {"period_s": 0.1},
    "100 ms averaging": {"period_s": 0.1, "averages": True},
}
COUNTERS = {
    "1 ms counter": {"period_s": 0.001},
    "20 ms counter": {"period_s": 0.02},
    "100 ms counter": {"period_s": 0.1},
    "100 ms counter, stamped": {"period_s": 0.1, "read_s": 0.002},  # as NVML's, by a thread of its own
}
COARSE = "steady, in steps of 0.5 to 2 W"
SPARSE = "bursts of 3 to 30 ms, 3 to 10 % of the time"
LATE = "everything 0.05 to 2 s late, which is not said"
SMOOTH = "averages over 0.05 to 2 s, which is not said"
LOADS = {
    "steady": (steady, none),
    "squares of 1 to 15 Hz": (square(1.0, 15.0), none),
    "squares of 15 to 60 Hz": (square(15.0, 60.0), none),
    "bursts of 3 to 30 ms, 10 to 50 % of the time": (bursts(0.1, 0.5), none),
    SPARSE: (bursts(0.03, 0.1), none),
    "ramps": (ramps, none),
    LATE: (mixed, none),
}
OF_POWERS = LOADS | {
    SMOOTH: (mixed, none),
    COARSE: (steady, none),
    "a value of 0": (mixed, value(lambda now, before: 0.0)),
    "a value ten times too high": (mixed, value(lambda now, before: 10.0 * now)),
    "two values of 0": (mixed, values(2, lambda rng: 0.0)),
    "two values ten times too high": (mixed, values(2, lambda rng: 10.0)),
    "two values 0.1 to 10 times as high": (mixed, values(2, lambda rng: 10 ** rng.uniform(-1.0, 1.0))),
    "a value stuck once": (mixed, value(lambda now, before: before)),
    "stuck for 1 to 20 updates": (mixed, stuck),
}
OF_COUNTERS = LOADS | {
    "fell by 0.1 to 1 update": (mixed, reset(0.1, 1.0)),
    "fell by 0.1 to 1 update, twice": (mixed, resets(2, 0.1, 1.0)),
    "fell by 1 to 100 updates": (mixed, reset(1.0, 100.0)),
}
# Its values are so few that in one of ten runs none of them meets a burst, and then nothing tells of them.
# So late is what a 20 ms counter shows of one update that it hides a loss of part of one, or of two.
UNKNOWABLE = {(SPARSE, "100 ms point"): 0.12, ("fell by 0.1 to 1 update, twice", "20 ms counter"): 0.2}


def facts_of(rng, name, sensor, read_s):
    """Return the sensor's facts: what it is, how it is read, and what this row adds."""
    facts = {"read_s": read_s} | (POWERS | COUNTERS)[sensor]
    if name == COARSE:
        facts |= {"step": rng.choice([0.5, 1.0, 2.0]), "noise_w": rng.choice([0.01, 0.1])}
    if name in (LATE, SMOOTH):
        facts["lag_s" if name == LATE else "smooth_s"] = 0.05 * 40 ** rng.random()
    return facts


def run(name, seed, load_of, fault, sensor):
    """Return what is measured in one run, and the true joules."""
    rng = random.Random(seed)
    window_s, read_s = rng.choice(WINDOWS_S), rng.choice(READS_S)
    facts = facts_of(rng, name, sensor, read_s)
    device, read_s = Sensor(rng, **facts), facts["read_s"]
    source = device.counter_source if sensor in COUNTERS else device.powers_source
    load = load_of(rng, window_s, energy.hold_s([source], read_s))
    samples = device.changes(load, window_s) if sensor in COUNTERS else device.powers(load, window_s)
    window = span(0.0, window_s)
    inside = [i for i, each in enumerate(samples) if window.start_ns < each.t_ns < window.end_ns]
    samples = fault(rng, samples, inside, source.period_s)
    return energy.measure(samples, [source], window, 100, read_s), load.energy(window_s) - load.energy(0.0)


def outcomes(name, load_of, fault, sensor, seeds):
    """Return the missed share of the runs, the share of null, and the median half-width as a share of the truth."""
    missed, halves = 0, []
    for seed in seeds:
        outcome, truth_j = run(name, seed, load_of, fault, sensor)
        if not isinstance(outcome, str):
            missed += abs(outcome.energy_j - truth_j) > outcome.energy_err_j
            halves.append(outcome.energy_err_j / truth_j)
    return missed / len(seeds), 1 - len(halves) / len(seeds), median(halves) if halves else math.nan


@pytest.mark.parametrize(
    ("sensors", "name", "row"),
    [(POWERS, *row) for row in OF_POWERS.items()] + [(COUNTERS, *row) for row in OF_COUNTERS.items()],
    ids=[f"power, {name}" for name in OF_POWERS] + [f"counter, {name}" for name in OF_COUNTERS],
)
def test_the_bar_covers_the_truth_over_all_sensors(sensors, name, row):
    runs = 5
    missed = [outcomes(name, *row, sensor, range(runs))[0] for sensor in sensors]
    assert sum(missed) / len(missed) <= most(MISSED, runs * len(missed))


CELLS = [(sensor, name, row) for name, row in OF_POWERS.items() for sensor in POWERS]
CELLS += [(sensor, name, row) for name, row in OF_COUNTERS.items() for sensor in COUNTERS]


@pytest.mark.slow
@pytest.mark.parametrize(("sensor", "name", "row"), CELLS, ids=[f"{name}, {sensor}" for sensor, name, _ in CELLS])
def test_the_bar_covers_the_truth_of_each_sensor(sensor, name, row):
    runs = 300
    missed, null, half = outcomes(name, *row, sensor, range(runs))
    sys.stdout.write(f"\n{name} | {sensor} | covered or null {1 - missed:.1%} | null {null:.1%} | half {half:.2%}")
    assert missed <= most(UNKNOWABLE.get((name, sensor), MISSED), runs)

"""Loads whose energy is known exactly, and sensors that see them: what tests of energy and its bar measure."""

from bisect import bisect_right
from itertools import accumulate, pairwise

from benchd.daemon.records import Sample, Window
from benchd.daemon.sampling.sources.protocol import PowerSource

READ_S = 0.02
IDLE_W = 4.0
IDLE_S = 3.0  # sampled before and after the load
START_NS = 7 * 10**17  # of the window: a machine that has been up for 22 years


class Load:
    """A load of constant power from one step to the next, in seconds after the start of the window."""

    def __init__(self, steps):
        self._times, self._watts = zip(*steps, strict=True)
        areas = [(b - a) * watts for (a, b), watts in zip(pairwise(self._times), self._watts, strict=False)]
        self._joules = list(accumulate(areas, initial=0.0))

    def power(self, t):
        return self._watts[bisect_right(self._times, t) - 1]

    def energy(self, t):
        """Return the joules since the first step."""
        i = bisect_right(self._times, t) - 1
        return self._joules[i] + self._watts[i] * (t - self._times[i])


def held(window_s, watts_of, step_s, phase, guard_s):
    """Return a load of `watts_of(i)` over its i-th `step_s`, from `guard_s` before the window to as long after it."""
    steps, t, i = [(-100.0, IDLE_W), (-guard_s, watts_of(0))], -guard_s + step_s * (1.0 - phase), 1
    while t < window_s + guard_s:
        steps.append((t, watts_of(i)))
        t, i = t + step_s, i + 1
    return Load([*steps, (window_s + guard_s, IDLE_W)])


class Sensor:
    """A sensor that renews its value by itself every `period_s`, and a sampler that reads it every `read_s`.

    The sampler wakes up late, by `late_s` on the mean, and loses a share of its readings. A power is the mean
    over its period where the sensor `averages`, else that of the moment. What it does not say: everything it shows is
    of `lag_s` ago, and a power is the mean over `smooth_s`.
    """

    def __init__(
        self,
        rng,
        period_s=0.02,
        *,
        averages=False,
        read_s=READ_S,
        noise_w=0.02,
        step=0.0,
        lost=0.0,
        late_s=0.0003,
        lag_s=0.0,
        smooth_s=0.0,
    ):
        self.read_s = read_s
        self.powers_source = source(period_s=period_s, averaging_s=period_s if averages else 0.0)
        self.counter_source = source("energy_counter_j", period_s=period_s)
        self._rng, self._noise_w, self._step, self._lost, self._late_s = rng, noise_w, step, lost, late_s
        self._lag_s, self._smooth_s = lag_s, smooth_s
        self._phase, self._read_phase = rng.random() * period_s, rng.random() * read_s

    def powers(self, load, window_s):
        averaging_s = self._smooth_s or self.powers_source.averaging_s

        def watts(now):
            t = now - self._lag_s
            mean_w = (load.energy(t) - load.energy(t - averaging_s)) / averaging_s if averaging_s else load.power(t)
            return mean_w + self._rng.gauss(0.0, self._noise_w)

        return [sample("power_w", t, value) for t, value in self._readings(window_s, watts)]

    def changes(self, load, window_s):
        """Return the first count and each that differs from the one before."""
        counts = list(self._readings(window_s, lambda t: load.energy(t - self._lag_s)))
        changes = counts[:1] + [after for before, after in pairwise(counts) if after[1] != before[1]]
        return [sample("energy_counter_j", t, value) for t, value in changes]

    def _readings(self, window_s, value_of):
        t, renewed, value, period_s = self._read_phase - IDLE_S, None, 0.0, self.powers_source.period_s
        while t < window_s + IDLE_S:
            read_at = t + min(self._rng.expovariate(1.0) * self._late_s, 0.9 * self.read_s)
            count = (read_at - self._phase) // period_s
            if count != renewed:
                renewed, value = count, value_of(self._phase + count * period_s)
                value = round(value / self._step) * self._step if self._step else value
            if self._rng.random() >= self._lost:
                yield read_at, value
            t += self.read_s


def sample(metric, t, value, name="sim"):
    return Sample(START_NS + round(t * 1e9), metric, value, name, "")


def source(metric="power_w", *, period_s=0.02, averaging_s=0.0, scope="board", total=True, name="sim"):
    return PowerSource(
        source=name, rail="", metric=metric, scope=scope, total=total, period_s=period_s, averaging_s=averaging_s
    )


def span(start_s, end_s):
    return Window(START_NS + round(start_s * 1e9), START_NS + round(end_s * 1e9))

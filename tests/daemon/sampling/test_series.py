from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchd.daemon.records import Sample, Window
from benchd.daemon.sampling.series import Samples
from benchd.daemon.sampling.sources.protocol import Batch


def batch(t_ns, samples=(), *, cpu_s=0.0, ticks_ns=(), failures=None):
    return Batch(
        samples=list(samples),
        t_ns=t_ns,
        cpu_s=cpu_s,
        ticks_ns=list(ticks_ns),
        flushes=0,
        failures=failures or {},
    )


def power(t_ns, value, rail="", source="fake"):
    return Sample(t_ns, "power_w", value, source, rail)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats(-1e9, 1e9)), min_size=1), st.integers(0, 100), st.integers(0, 100)
)
def test_a_summary_is_of_the_samples_in_the_window_and_no_others(points, start, end):
    points.sort()
    samples = Samples(["fake"], 0.1)
    samples.add(batch(200, [power(t, value) for t, value in points]))
    inside = [value for t, value in points if start <= t <= end]
    summaries, report = samples.cut(Window(start, end))
    assert report.samples == len(inside)
    if not inside:
        assert summaries == {}
        return
    summary = summaries["power_w"]
    assert (summary.minimum, summary.maximum, summary.samples, summary.source) == (
        min(inside),
        max(inside),
        len(inside),
        "fake",
    )
    assert summary.mean == pytest.approx(sum(inside) / len(inside))


def test_raw_samples_are_those_of_the_window_and_keep_their_names():
    samples = Samples(["fake"], 0.1)
    inside = [power(10, 1.0), power(20, 2.0, rail="VDD"), power(20, 3.0)]
    samples.add(batch(30, [power(5, 0.0), *inside, power(25, 4.0)]))
    assert sorted(map(str, samples.raw(Window(10, 20)))) == sorted(map(str, inside))


@given(st.lists(st.integers(1, 50), min_size=2, max_size=20), st.integers(0, 600))
def test_what_is_dropped_is_not_missed_in_later_windows(gaps, dropped):
    samples, t_ns, times = Samples(["fake"], 1e-8), 0, []
    for i, gap in enumerate(gaps):
        t_ns += gap
        times.append(t_ns)
        samples.add(batch(t_ns, [power(t_ns, i)], cpu_s=i * 0.1, ticks_ns=[t_ns], failures={"fake": f"at {t_ns}"}))
    windows = [Window(a, b) for a, b in pairwise(times) if a >= dropped]
    before = [samples.cut(window) for window in windows]
    samples.drop_before(dropped)
    assert [samples.cut(window) for window in windows] == before
    assert samples.cut(Window(0, dropped - 1))[1].samples == 0


def test_rails_are_apart_and_the_first_source_of_a_metric_counts():
    samples = Samples(["a", "b"], 0.1)
    samples.add(batch(9, [power(1, 1.0, "VDD_IN", "a"), power(1, 2.0, "VDD_SOC", "a"), power(2, 9.0, "VDD_IN", "b")]))
    summaries, report = samples.cut(Window(0, 9))
    assert {name: summary.mean for name, summary in summaries.items()} == {
        "power_w@VDD_IN": 1.0,
        "power_w@VDD_SOC": 2.0,
    }
    assert (report.sources, report.samples) == (["a", "b"], 3)


def test_cpu_time_is_read_off_between_batches_and_begins_anew_with_a_process():
    samples = Samples(["fake"], 0.1)
    assert samples.cut(Window(0, 9))[1].cpu_s == 0.0
    for t_ns, cpu_s in ((0, 1.0), (100, 2.0), (200, 2.5)):
        samples.add(batch(t_ns, cpu_s=cpu_s))
    assert samples.cut(Window(50, 100))[1].cpu_s == pytest.approx(0.5)
    assert samples.cut(Window(50, 150))[1].cpu_s == pytest.approx(0.75)
    assert samples.cut(Window(50, 900))[1].cpu_s == pytest.approx(1.0)
    samples.begin_process()
    for t_ns, cpu_s in ((300, 0.25), (400, 0.5)):
        samples.add(batch(t_ns, cpu_s=cpu_s))
    assert samples.cut(Window(300, 400))[1].cpu_s == pytest.approx(0.25)


def test_failures_of_the_window_alone():
    samples = Samples(["fake"], 0.1)
    samples.add(batch(100))
    samples.add(batch(200, failures={"fake": "first"}))
    samples.add(batch(300, failures={"fake": "second"}))
    samples.fail(Window(400, 500), {"sampler": "died"})
    assert samples.cut(Window(0, 99))[1].failures == {}
    assert samples.cut(Window(150, 350))[1].failures == {"fake": "first"}
    assert samples.cut(Window(250, 450))[1].failures == {"fake": "second", "sampler": "died"}

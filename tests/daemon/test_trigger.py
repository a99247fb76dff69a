"""When a suite begins: every form, the calendar's corners, and each mistake by name."""

import calendar
import time

import pytest

from benchd.daemon import trigger
from benchd.daemon.errors import UsageError


@pytest.fixture(autouse=True)
def _in_berlin(monkeypatch):
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def local(text):
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M"))


def following(cron, start, count=3):
    """Return the next times of a cron line as local text."""
    times, at = [], local(start)
    for _ in range(count):
        at = trigger.parse(None, None, cron).next_after(at)
        times.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(at)))
    return times


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30 min", 1800), ("1.5h", 5400), ("2d", 172800)])
def test_every(text, seconds):
    assert trigger.parse(text, None, None).next_after(1000.0) == 1000.0 + seconds


@pytest.mark.parametrize(
    ("cron", "times"),
    [
        ("*/20 * * * *", ["2026-01-01 00:20", "2026-01-01 00:40", "2026-01-01 01:00"]),
        ("5/30 1,3-4 * * *", ["2026-01-01 01:05", "2026-01-01 01:35", "2026-01-01 03:05"]),
        ("0 6 * * 1-5", ["2026-01-01 06:00", "2026-01-02 06:00", "2026-01-05 06:00"]),
        ("0 0 31 * *", ["2026-01-31 00:00", "2026-03-31 00:00", "2026-05-31 00:00"]),
        ("0 0 29 2 *", ["2028-02-29 00:00", "2032-02-29 00:00", "2036-02-29 00:00"]),
        ("0 12 13 * 7", ["2026-01-04 12:00", "2026-01-11 12:00", "2026-01-13 12:00"]),
    ],
)
def test_cron(cron, times):
    assert following(cron, "2026-01-01 00:00") == times


def test_a_time_zone_that_is_set_after_the_start_counts(monkeypatch):
    nightly, noon_s = trigger.parse(None, "02:30", None), local("2026-01-31 12:00")
    assert nightly.next_after(noon_s) == local("2026-02-01 02:30")
    monkeypatch.setenv("TZ", "JST-9")
    assert nightly.next_after(noon_s) == calendar.timegm((2026, 1, 31, 17, 30, 0))


def test_an_hour_that_the_clock_skips_is_left_out_and_a_day_of_23_hours_is_not_lost():
    assert following("30 2 * * *", "2026-03-28 12:00", 2) == ["2026-03-30 02:30", "2026-03-31 02:30"]
    assert following("30 3 * * *", "2026-03-28 12:00", 1) == ["2026-03-29 03:30"]


def test_an_hour_that_the_clock_repeats_comes_twice():
    repeated = trigger.parse(None, None, "*/30 2 * * *")
    times = [local("2026-10-25 01:00")]
    while len(times) < 5:
        times.append(repeated.next_after(times[-1]))
    assert [(at - times[0]) / 60 for at in times[1:]] == [60, 90, 120, 150]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("6 hours", None, None), "every '6 hours': expected a number and one of s, min, h, d"),
        (("1.h", None, None), "every '1.h': expected"),
        (("30s", None, None), "expected at least one minute"),
        ((None, "24:00", None), "at '24:00': expected hours and minutes"),
        ((None, None, "* * * *"), "cron .*: not five fields; expected minute, hour, day of month"),
        ((None, None, "* * * * * *"), "cron .*: not five fields"),
        ((None, None, "61 * * * *"), "cron .*: bad minute; expected"),
        ((None, None, "*/0 * * * *"), "bad minute"),
        ((None, None, "* 5-1 * * *"), "bad hour"),
        ((None, None, "* * * * x"), "bad day-of-week"),
        ((None, None, "0 0 30 2 *"), "bad day-of-month"),
        (("6h", "02:30", None), "every and at: give only one of them"),
    ],
)
def test_a_mistake_is_named(given, words):
    with pytest.raises(UsageError, match=words):
        trigger.parse(*given)

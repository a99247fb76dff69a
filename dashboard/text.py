"""Formats numbers, times and text from devices for pages and the terminal."""

import math
from collections.abc import Mapping
from datetime import datetime, timezone, tzinfo

from benchd.daemon.delivery.messages import Latest
from benchd.daemon.records import TOP1
from benchd.daemon.reporting import results_table
from benchd.daemon.verdicts.effects import Verdict
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Device, State

UNITS = {"bytes": (2.0**30, "GiB"), "hz": (1e6, "MHz"), "w": (1.0, "W")}
TEXT = 200  # maximum number of characters of a device's text to show
SIGNS: dict[State, str] = {"online": "● online", "silent": "○ silent", "unknown": "◌ no status"}


def short(value: object) -> str:
    """Return a value as text of limited length."""
    parts = [f"{name} {item}" for name, item in value.items()] if isinstance(value, dict) else value
    text = ", ".join(map(str, parts)) if isinstance(parts, list | tuple) else str(value)
    return text if len(text) <= TEXT else f"{text[:TEXT]}…"


def figure(value: float | None, unit: str = "") -> str:
    """Return the value with four significant digits and the unit, or a dash if it was not measured."""
    return "-" if value is None else f"{results_table.figure(value)} {unit}".rstrip()


def plus_minus(value: float | None, error: float | None, unit: str) -> str:
    """Return a value and its error bar, both rounded to the second digit of the error."""
    if value is None or not error:
        return figure(value, unit)
    # based on the rounded error: 0.0999 becomes 0.10
    places = max(1 - math.floor(math.log10(float(f"{error:.1e}"))), 0)
    if abs(value) >= 1e6 or places > 6:
        return f"{figure(value)} ± {figure(error)} {unit}"
    return f"{value:.{places}f} ± {error:.{places}f} {unit}"


def rounded(value: float | None, share: float | None, unit: str) -> str:
    """Return a value rounded to the second digit of its error, which is given as a share of the value."""
    if not value or not share:
        return figure(value, unit)
    number, has_error, _ = plus_minus(value, abs(value) * share, unit).partition(" ± ")
    return f"{number} {unit}" if has_error else number


def error_share(result: Result) -> float | None:
    """Return half the width of the median's interval as a share of the median, or None without an interval."""
    if not result.median_ms or result.low_ms is None or result.high_ms is None:
        return None
    return (result.high_ms - result.low_ms) / 2 / result.median_ms


def time(result: Result) -> str:
    """Return a median with half the width of its interval, or with both ends if half the width would extend below 0."""
    if result.low_ms is None or result.high_ms is None:
        return median(result)
    if result.median_ms is not None and result.high_ms - result.low_ms >= 2 * result.median_ms:
        return median(result)
    return plus_minus(result.median_ms, (result.high_ms - result.low_ms) / 2, "ms")


def board(names: Mapping[str, str], device_id: str) -> str:
    """Return a board's name without its id, from names with ids."""
    return short(names.get(device_id, device_id).removesuffix(f" ({device_id})"))


def count(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural if necessary."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def fact(name: str, value: object) -> tuple[str, object]:
    """Return a fact of an environment in words, in a readable unit."""
    stem, _, ending = name.rpartition("_")
    if ending in UNITS and isinstance(value, int | float):
        size, unit = UNITS[ending]
        return stem.replace("_", " "), figure(value / size, unit)
    return name.replace("_", " "), value


def more(number: int) -> str:
    """Return how many more things there are than shown, or an empty string."""
    return f"and {number} more" if number > 0 else ""


def age(seconds: float | None) -> str:
    """Return how long ago something was, in words."""
    if seconds is None:
        return "never"
    if seconds < 10:
        return "just now"
    if seconds < 120:
        return f"{seconds // 10 * 10:.0f} s ago"
    for limit, unit_s, unit in ((7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // unit_s:.0f} {unit} ago"
    return f"{seconds // 86400:.0f} days ago"


def clock(unix_s: float, zone: tzinfo = timezone.utc) -> str:
    """Return a time to the second, with the name of its zone."""
    return datetime.fromtimestamp(unix_s, zone).strftime("%Y-%m-%d %H:%M:%S %Z")


def doing(device: Device) -> str:
    """Return the current activity of a device."""
    health = device.health
    if health.case_id:
        left = f", {count(health.cases_left, 'case')} left" if health.cases_left else ""
        was = "was " * (device.state == "silent")
        return short(f"{was}measuring {health.case_id}{left}")
    return short(health.waiting_for or health.activity or "no service is reporting")


def sensors(device: Device) -> str:
    """Return the highest power and temperature of a device, as far as it reports them."""
    known = {"power": figure(device.power_w, "W"), "temperature": figure(device.temp_c, "°C")}
    return ", ".join(f"{name} {words}" for name, words in known.items() if words != "-")


def throttling(device: Device) -> str:
    """Return whether the clocks are throttled, as far as sensors report."""
    if device.throttled is None:
        return "throttling not known"
    return "clocks are throttled" if device.throttled else "not throttled"


def median(result: Result) -> str:
    """Return a median with its interval, or a remark that there is none."""
    if result.low_ms is None or result.high_ms is None:
        return figure(result.median_ms, "ms") + (", no interval" if result.median_ms is not None else "")
    return f"{figure(result.median_ms)} [{figure(result.low_ms)}, {figure(result.high_ms)}] ms"


def energy(result: Result) -> str:
    """Return the energy per inference with its error bar."""
    return plus_minus(result.energy_mj, result.energy_err_mj, "mJ")


def accuracy(result: Result | Latest) -> str:
    """Return top-1 or the task's metric with its interval, and the drop relative to plain fp32; top-1 in percent."""
    if result.accuracy_value is None or result.accuracy_low is None or result.accuracy_high is None:
        return "-"
    if result.accuracy_metric != TOP1:
        drop = f", {result.accuracy_drop:.3g} worse than fp32" if result.accuracy_drop is not None else ""
        interval = f"{result.accuracy_low:.4g}, {result.accuracy_high:.4g}"
        return f"{result.accuracy_metric} {result.accuracy_value:.4g} [{interval}]{drop}"
    interval = f"{100 * result.accuracy_low:.1f}, {100 * result.accuracy_high:.1f}"
    drop = f", {100 * result.accuracy_drop:.2f} below fp32" if result.accuracy_drop is not None else ""
    return f"{TOP1} {100 * result.accuracy_value:.1f} [{interval}] %{drop}"


def percent(change: float, sign: str = "+", places: int = 1) -> str:
    """Return a change in percent, without the unit; a huge one, which boards may send, has four digits."""
    return f"{100 * change:{sign}.{places}f}" if abs(change) < 1e4 else f"{100 * change:{sign}.4g}"


def share(judged: Verdict) -> str:
    """Return the change of the time with its interval, in percent."""
    interval = judged.interval and f" [{percent(judged.interval.low, '-')}, {percent(judged.interval.high, '-')}]"
    return f"{percent(judged.effect or 0.0)} %{interval or ''}"


def verdict(judged: Verdict) -> str:
    """Return the verdict on B compared with A: the answer, the change of the time with its interval, and any reason."""
    text = judged.answer.upper()
    if judged.effect is not None:
        text += f": time of B relative to A {percent(judged.effect, places=2)} %"
    if judged.interval and judged.confidence:
        interval = f"{percent(judged.interval.low, places=2)}, {percent(judged.interval.high, places=2)}"
        text += f" [{interval} at {100 * judged.confidence:.4g} %]"
    return f"{text}: {judged.reason}" if judged.reason else text

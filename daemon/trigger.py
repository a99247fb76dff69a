"""When a suite begins, as the configuration says it (`every`, `at`, `cron`) and as times; pure.

Times are seconds since the epoch. `at` and `cron` mean local time: one that the clock skips in spring is left out, one
that it repeats in autumn comes twice.
"""

import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchd.daemon.errors import UsageError

UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
LOOK_AHEAD_DAYS = 8 * 366  # the 29th of February may be eight years away
MINUTE_S, DAY_S = 60, 86400
_RANGES = {"minute": (0, 59), "hour": (0, 23), "day of month": (1, 31), "month": (1, 12), "day of week": (0, 7)}
_PART = re.compile(r"(?:\*|(\d+)(?:-(\d+))?)(?:/(\d+))?")


@dataclass(frozen=True)
class Every:
    """So many seconds after the last time."""

    period_s: float

    def next_after(self, t_s: float) -> float:
        """Return the first time after `t_s`."""
        return t_s + self.period_s


@dataclass(frozen=True)
class Cron:
    """The minutes whose local time is in all five sets; of two restricted days, as in cron, either is enough."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool

    def next_after(self, t_s: float) -> float | None:
        """Return the first time after `t_s`, None where there is none within eight years."""
        minute_s = t_s // MINUTE_S * MINUTE_S + MINUTE_S
        end_s = t_s + LOOK_AHEAD_DAYS * DAY_S
        while minute_s < end_s:
            local = time.localtime(minute_s)
            if not self._on(local):
                minute_s = _next_day(local)
            elif local.tm_hour in self.hours and local.tm_min in self.minutes:
                return minute_s
            else:
                minute_s += MINUTE_S
        return None

    def _on(self, local: time.struct_time) -> bool:
        if local.tm_mon not in self.months:
            return False
        days = (local.tm_mday in self.days, (local.tm_wday + 1) % 7 in self.weekdays)
        return any(days) if self.either_day else all(days)


Trigger = Every | Cron


def _next_day(local: time.struct_time) -> float:
    return time.mktime((local.tm_year, local.tm_mon, local.tm_mday + 1, 0, 0, 0, 0, 0, -1))


@functools.cache
def parse(every: str | None, at: str | None, cron: str | None) -> Trigger | None:
    """Return what the one that is given means, None where none is; raise UsageError for two or for nonsense."""
    given = [name for name, value in (("every", every), ("at", at), ("cron", cron)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one of them")
    if every is not None:
        return Every(_seconds(every))
    if at is not None:
        return _daily(at)
    return None if cron is None else _cron(cron)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]+)", text)
    if not found or found[2] not in UNITS_S:
        raise UsageError(f"every {text!r}: expected a number and one of {', '.join(UNITS_S)}, as in '6h'")
    seconds = float(found[1]) * UNITS_S[found[2]]
    if seconds < MINUTE_S:
        raise UsageError(f"every {text!r}: at least a minute")
    return seconds


def _daily(text: str) -> Cron:
    found = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text)
    if not found:
        raise UsageError(f"at {text!r}: expected hours and minutes, as in '02:30'")
    return _cron(f"{int(found[2])} {int(found[1])} * * *")


def _cron(text: str) -> Cron:
    fields = text.split()
    if len(fields) != len(_RANGES):
        raise UsageError(f"cron {text!r}: expected {', '.join(_RANGES)}, as in '30 2 * * 1-5'")
    sets = [_values(text, field, name) for field, name in zip(fields, _RANGES, strict=True)]
    weekdays = frozenset(day % 7 for day in sets[4])
    trigger = Cron(sets[0], sets[1], sets[2], sets[3], weekdays, "*" not in (fields[2][0], fields[4][0]))
    if trigger.next_after(0.0) is None:
        raise UsageError(f"cron {text!r}: there is no such day")
    return trigger


def _values(text: str, field: str, name: str) -> frozenset[int]:
    values: set[int] = set()
    for part in field.split(","):
        found = _PART.fullmatch(part)
        if not found:
            raise UsageError(f"cron {text!r}: {part!r} is no {name}; use numbers with * , - and /")
        values.update(_span(text, found.groups(), name))
    return frozenset(values)


def _span(text: str, given: Sequence[str | None], name: str) -> range:
    low, high = _RANGES[name]
    first, last, step = (None if number is None else int(number) for number in given)
    if first is not None:
        # `5/10` counts from 5 to the end, `5` is itself
        low, high = first, last if last is not None else high if step else first
    if not _RANGES[name][0] <= low <= high <= _RANGES[name][1] or step == 0:
        raise UsageError(f"cron {text!r}: a {name} is {_RANGES[name][0]} to {_RANGES[name][1]}, a step at least 1")
    return range(low, high + 1, step or 1)

"""Parses a suite's `every`, `at` and `cron`, and computes when it next starts; pure except for the time zone.

Times are seconds since the epoch. `at` and `cron` use local time: a time skipped by the clock change in spring is
omitted, and a time repeated in autumn occurs twice.
"""

import functools
import re
import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from cronsim import CronSim, CronSimError

from benchd.daemon.errors import UsageError

UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MINUTE_S, DAY_S = 60, 86400
LONGEST_S = 3652.5 * DAY_S
MONTH_S = 365.25 * DAY_S / 12
FIELDS = ("minute", "hour", "day of month", "month", "day of week")


@dataclass(frozen=True)
class Every:
    """A fixed period, in seconds after the last time."""

    period_s: float

    def next_after(self, t_s: float) -> float:
        """Return the first time after `t_s`."""
        return t_s + self.period_s


@dataclass(frozen=True)
class Cron:
    """A cron line, interpreted the way Debian's cron does, except at clock changes."""

    line: str

    def next_after(self, t_s: float) -> float | None:
        """Return the first time after `t_s`, None if there is none within fifty years."""
        time.tzset()  # otherwise the zone would stay that of the process's start
        times_s: list[float] = []
        # starts an hour earlier, because the clock may repeat that hour
        for local in CronSim(self.line, datetime.fromtimestamp(t_s) - timedelta(hours=1)):
            both_s = [local.replace(fold=fold).timestamp() for fold in (0, 1)]
            times_s += [at_s for at_s in both_s if at_s > t_s and datetime.fromtimestamp(at_s) == local]
            if times_s and both_s[0] > t_s:
                return min(times_s)
        return None


Trigger = Every | Cron


@functools.cache
def parse(every: str | None, at: str | None, cron: str | None) -> Trigger | None:
    """Return the trigger for the given value, None without one; raise UsageError for two values or an invalid one."""
    given = [name for name, value in (("every", every), ("at", at), ("cron", cron)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give only one of them")
    if every is not None:
        return Every(_seconds(every))
    if at is not None:
        return _daily(at)
    return None if cron is None else _cron(cron)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]+)", text)
    if not match or match[2] not in UNITS_S:
        raise UsageError(f"every {text!r}: expected a number and one of {', '.join(UNITS_S)}, as in '6h'")
    seconds = float(match[1]) * UNITS_S[match[2]]
    if not MINUTE_S <= seconds <= LONGEST_S:
        raise UsageError(f"every {text!r}: expected at least one minute and at most ten years")
    return seconds


def _daily(text: str) -> Cron:
    match = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text)
    if not match:
        raise UsageError(f"at {text!r}: expected hours and minutes, as in '02:30'")
    return _cron(f"{int(match[2])} {int(match[1])} * * *")


def _cron(text: str) -> Cron:
    try:
        if len(text.split()) == len(FIELDS) and Cron(text).next_after(0.0):
            return Cron(text)
        reason = "not five fields"
    except CronSimError as error:
        reason = str(error).lower()
    raise UsageError(f"cron {text!r}: {reason}; expected {', '.join(FIELDS)}, as in '30 2 * * 1-5'")

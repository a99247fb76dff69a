"""Determines when something happened by its device's clock, if that clock is plausible; pure."""

import math
from collections.abc import Sequence
from datetime import datetime, timezone

from benchd.daemon.records import Record, unix_s

EARLIEST_S = datetime(2025, 1, 1, tzinfo=timezone.utc).timestamp()
"""The start of 2025, before benchd existed; an earlier time comes from a clock that was not set."""

AHEAD_S = 300.0
"""How far a device's clock may be ahead of the receiving machine's."""

HALF_A_DAY_S = 12 * 3600.0
"""Runs this far apart count as independent: an hourly correlation of 0.8 has dropped to 0.07."""


def days(records: Sequence[Record]) -> dict[str, str]:
    """Return the day of each record by its key: its boot, and the time of the first run in its half-day."""
    begun_s: dict[str, float] = {}
    day_of: dict[str, str] = {}
    for record in sorted(records, key=_measured_s):
        now_s = _measured_s(record)
        if now_s - begun_s.get(record.boot_id, -math.inf) >= HALF_A_DAY_S:
            begun_s[record.boot_id] = now_s
        day_of[record.key] = f"{record.boot_id} {begun_s[record.boot_id]}"
    return day_of


def _measured_s(record: Record) -> float:
    return unix_s(record.t_wall) or 0.0


def is_unset(t_wall: str) -> bool:
    """Return whether this time comes from a clock that was not set, for example after a boot without a network."""
    said_s = unix_s(t_wall)
    return said_s is not None and said_s < EARLIEST_S


def measured_s(t_wall: str, arrived_s: float) -> float | None:
    """Return the Unix time of `t_wall` in a message that arrived at `arrived_s`; None if it is implausible."""
    said_s = unix_s(t_wall)
    return said_s if said_s is not None and EARLIEST_S <= said_s <= arrived_s + AHEAD_S else None

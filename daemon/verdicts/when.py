"""When something happened, by its device's clock if that can have been right; pure."""

from datetime import datetime, timezone

EARLIEST_S = datetime(2025, 1, 1, tzinfo=timezone.utc).timestamp()
"""Before benchd existed: an earlier time is that of a clock that was never set."""

AHEAD_S = 300.0
"""How far a device's clock may be ahead of that of the machine that received the message."""


def unix_s(t_wall: str) -> float | None:
    """Return the Unix time of a `t_wall`; None if it is not a time in RFC 3339."""
    try:
        said = datetime.fromisoformat(t_wall.replace("Z", "+00:00"))
    except ValueError:
        return None
    return said.timestamp() if said.tzinfo else None


def measured_s(t_wall: str, arrived_s: float) -> float | None:
    """Return the Unix time of `t_wall` in something that arrived at `arrived_s`; None if no right clock says so."""
    said_s = unix_s(t_wall)
    return said_s if said_s is not None and EARLIEST_S <= said_s <= arrived_s + AHEAD_S else None

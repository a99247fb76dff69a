"""When something happened, by its device's clock if that can have been right; pure."""

from datetime import datetime, timezone

EARLIEST_S = datetime(2025, 1, 1, tzinfo=timezone.utc).timestamp()
"""Before benchd existed: an earlier time is that of a clock that was never set."""

AHEAD_S = 300.0
"""How far a device's clock may be ahead of that of the machine that received the message."""


def measured_s(t_wall: str, arrived_s: float) -> float | None:
    """Return the Unix time of `t_wall` in something that arrived at `arrived_s`; None if no right clock says so."""
    try:
        said = datetime.fromisoformat(t_wall.replace("Z", "+00:00"))
    except ValueError:
        return None
    said_s = said.timestamp() if said.tzinfo else 0.0
    return said_s if EARLIEST_S <= said_s <= arrived_s + AHEAD_S else None

"""Size limits of messages by kind: a larger message is rejected before anything is built from it."""

from datetime import datetime, timezone

from benchd.daemon.delivery.messages import RESULT_BYTES

BYTES = {
    "result": RESULT_BYTES,
    "status": 4 * 1024,
    "info": 256 * 1024,
    "health": 16 * 1024,
    "latest": 8 * 1024,
    "shipped": 8 * 1024,
    "telemetry": 64 * 1024,
    "event": 64 * 1024,
}
OTHER_BYTES = 64 * 1024
VALUES = 50_000  # a real record has 1,400; each value takes far more memory than in JSON
SHOWN = 50  # a page shows at most this many items, and how many more there are
READ = 1_000  # items beyond this number are not even counted
DAY_S = 86_400.0
LAST_PAGE = 1_000_000  # keeps the offset within the integers of databases and browsers


class TooLarge(Exception):
    """A message beyond the limits of its kind; the text says which limit."""


def page(given: int) -> int:
    """Return a page number from an address, limited to the valid range."""
    return min(max(given, 1), LAST_PAGE)


def day_s(text: str) -> float | None:
    """Return the Unix time when a day such as 2026-11-20 begins in UTC; None if the text is not a day."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def check(kind: str, body: bytes) -> None:
    """Raise TooLarge for a body beyond the limits of its kind, whether or not it is JSON."""
    if len(body) > (most := BYTES.get(kind, OTHER_BYTES)):
        raise TooLarge(f"more than {most} bytes")
    if sum(map(body.count, (b"{", b"[", b","))) > VALUES:  # includes characters inside strings
        raise TooLarge(f"more than {VALUES} values")

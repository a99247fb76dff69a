"""The most that a message may hold, by kind: a larger one is turned away before anything is built from it."""

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
VALUES = 50_000  # a real record has 1,400; each takes far more memory than in JSON
SHOWN = 50  # a page shows the first so many of anything, and how many more there are
READ = 1_000  # and counts no further
DAY_S = 86_400.0
LAST_PAGE = 1_000_000  # its offset fits in the integers of databases and browsers


class TooLarge(Exception):
    """A message beyond the limits of its kind; the text says which."""


def page(given: int) -> int:
    """Return the number of a page as an address names it, within what there can be."""
    return min(max(given, 1), LAST_PAGE)


def day_s(text: str) -> float | None:
    """Return when a day like 2026-11-20 begins in UTC, in Unix time; None if it is no day."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def check(kind: str, body: bytes) -> None:
    """Raise TooLarge for a body beyond the limits of its kind, whether or not it is JSON."""
    if len(body) > (most := BYTES.get(kind, OTHER_BYTES)):
        raise TooLarge(f"more than {most} bytes")
    if sum(map(body.count, (b"{", b"[", b","))) > VALUES:  # those in texts count too
        raise TooLarge(f"more than {VALUES} values")

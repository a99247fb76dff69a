"""The most that a message may hold, by kind: a larger one is turned away before anything is built from it."""

import re
from typing import NamedTuple

from benchd.daemon.delivery.messages import RESULT_BYTES


class JsonLimit(NamedTuple):
    """`values` counts the keys of objects and the entries of lists, `depth` the brackets that are open at once."""

    bytes: int
    values: int
    depth: int


# a real record has 21 kB, 1,400 values and a depth of 6
LIMITS = {
    "result": JsonLimit(RESULT_BYTES, 50_000, 32),
    "status": JsonLimit(4 * 1024, 64, 4),
    "info": JsonLimit(256 * 1024, 10_000, 8),
    "health": JsonLimit(16 * 1024, 256, 8),
    "latest": JsonLimit(8 * 1024, 128, 4),
    "shipped": JsonLimit(8 * 1024, 128, 4),
    "telemetry": JsonLimit(64 * 1024, 5_000, 4),
    "event": JsonLimit(64 * 1024, 2_000, 8),
}
OTHER = JsonLimit(64 * 1024, 10_000, 32)
SHOWN = 50  # a page shows the first so many of anything, and how many more there are
READ = 1_000  # and counts no further
LAST_PAGE = 1_000_000  # its offset fits in the integers of databases and browsers

_NOT_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[^][{},]+')


class TooLarge(Exception):
    """A message beyond the limits of its kind; the text says which."""


def page(given: int) -> int:
    """Return the number of a page as an address names it, within what there can be."""
    return min(max(given, 1), LAST_PAGE)


def check(kind: str, body: bytes) -> None:
    """Raise TooLarge for a body beyond the limits of its kind, whether or not it is JSON."""
    limit = LIMITS.get(kind, OTHER)
    if len(body) > limit.bytes:
        raise TooLarge(f"more than {limit.bytes} bytes")
    opened = body.count(b"{") + body.count(b"[")
    if opened + body.count(b",") <= limit.values and opened <= limit.depth:
        return
    structure = _NOT_STRUCTURE.sub(b"", body)
    opened = structure.count(b"{") + structure.count(b"[")
    if opened + structure.count(b",") > limit.values:
        raise TooLarge(f"more than {limit.values} values")
    if opened > limit.depth and _depth(structure) > limit.depth:
        raise TooLarge(f"nested more than {limit.depth} deep")


def _depth(structure: bytes) -> int:
    depth = most = 0
    for char in structure:
        depth += (char in b"[{") - (char in b"]}")
        most = max(most, depth)
    return most

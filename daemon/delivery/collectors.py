"""The known collectors and what they have stored: while there is one, a broker's acknowledgement is not enough."""

import math
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.outbox import Outbox, Row
from benchd.daemon.delivery.topics import is_name

KNOWN_S = 7 * 86400.0
MAX_KNOWN = 16
AGAIN_FIRST_S, AGAIN_LAST_S = 30.0, 3600.0
REASON_CHARS = 200
KEEP_S = 3600.0  # the stored times may be this old
NAMES = "collectors"  # the key that an earlier version used
SILENT = "collectors_silent_s"


class Ack(Struct, frozen=True):
    """A collector's acknowledgement of the results that it has stored; `unread`: those it cannot read, and why."""

    keys: list[str]
    unread: dict[str, str] = {}


class Collectors:
    """The collectors named in the configuration, and those heard from in the last seven days of the service's uptime.

    Uptime, because setting the clock must not drop a collector together with everything that waits for it.
    """

    def __init__(self, outbox: Outbox, named: Sequence[str]) -> None:
        self._outbox, self._named = outbox, list(named)
        self._heard_s = {name: time.monotonic() - silent_s for name, silent_s in _silent_s(outbox).items()}
        self._kept_s = time.monotonic()
        self._again_s, self._again_delay_s = 0.0, AGAIN_FIRST_S
        self._unread_s = 0.0
        self._told: set[str] = set()  # collectors whose unread results were reported

    def awaited(self, row: Row) -> bool:
        """Return whether a collector must store this message before it is deleted; only results are acknowledged."""
        return bool(self._named or self._heard_s) and "/result/" in row.topic

    def take(self, name: str, body: bytes) -> str | None:
        """Apply an acknowledgement; a malformed one changes nothing. Return, once, that it cannot read something."""
        try:
            ack = msgspec.json.decode(body, type=Ack)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if is_name(name) and (name in self._heard_s or len(self._heard_s) < MAX_KNOWN):
            silent_s = time.monotonic() - self._heard_s.get(name, -math.inf)
            self._heard_s[name] = time.monotonic()
            if silent_s > KEEP_S:
                self._keep(time.monotonic())
        self._outbox.mark_stored(ack.keys)
        self._again_delay_s = AGAIN_FIRST_S
        self._again_s = time.monotonic() + AGAIN_FIRST_S
        return self._unread(name, ack.unread)

    def _unread(self, name: str, reasons: dict[str, str]) -> str | None:
        count = self._outbox.mark_unread(list(reasons)) if reasons else 0
        if not count or name in self._told or len(self._told) == MAX_KNOWN:
            return None
        self._told.add(name)
        reason = next(iter(reasons.values()))[:REASON_CHARS]
        return f"{name} cannot read {count} results ({reason}); they are kept and sent again every hour"

    def send_again(self, now_s: float) -> bool:
        """Mark unstored results as pending again, with growing delays: the broker may have lost them. Return if any.

        Those that a collector could not read wait for its next version, whatever else it stores meanwhile.
        """
        count = 0
        if now_s >= self._again_s:
            self._again_s = now_s + self._again_delay_s
            self._again_delay_s = min(2 * self._again_delay_s, AGAIN_LAST_S)
            count += self._outbox.send_unstored()
        if now_s >= self._unread_s:
            self._unread_s = now_s + AGAIN_LAST_S
            count += self._outbox.send_unstored(unread=True)
        return count > 0

    def expire(self, now_s: float) -> str | None:
        """Forget collectors silent for too long at the monotonic time `now_s`; return the consequence, None if none."""
        gone = [name for name, heard_s in self._heard_s.items() if now_s - heard_s > KNOWN_S]
        for name in gone:
            del self._heard_s[name]
        if gone or (self._heard_s and now_s - self._kept_s > KEEP_S):
            self._keep(now_s)
        if not gone or self._heard_s or self._named:
            return None
        rows = self._outbox.expect_no_collector()
        return f"no acknowledgement from {', '.join(gone)} for seven days: {rows} results now count as sent"

    def _keep(self, now_s: float) -> None:
        silent_s = {name: round(now_s - heard_s) for name, heard_s in sorted(self._heard_s.items())}
        self._outbox.keep({SILENT: msgspec.json.encode(silent_s)})
        self._kept_s = now_s


def _silent_s(outbox: Outbox) -> dict[str, float]:
    """Return how long each known collector has been silent."""
    if outbox.kept(SILENT) is None:
        names: list[str] = outbox.kept_as(NAMES, msgspec.json.Decoder(list[str]).decode, [])
        return dict.fromkeys(names, 0.0)
    return outbox.kept_as(SILENT, msgspec.json.Decoder(dict[str, float]).decode, {})

"""The known collectors and what they have stored: while there is one, a broker's acknowledgement is not enough."""

import math
import time
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.outbox import Outbox, Row
from benchd.daemon.delivery.topics import is_name

KNOWN_S = 7 * 86400.0
MAX_KNOWN = 16
AGAIN_FIRST_S, AGAIN_LAST_S = 30.0, 3600.0
KEEP_S = 3600.0  # the stored times may be this old
NAMES = "collectors"  # the key that an earlier version used
SILENT = "collectors_silent_s"


class Ack(Struct, frozen=True):
    """A collector's acknowledgement of the results that it has stored.

    `digests` has the SHA-256 of each one's bytes, in hex, which proves that the sender has received them. Only a
    collector that the device's configuration names may leave them out.
    """

    keys: list[str]
    digests: list[str] = []


class Collectors:
    """The collectors named in the configuration, and those that stored something in the last seven days of uptime.

    Uptime, because setting the clock must not drop a collector together with everything that waits for it.
    """

    def __init__(self, outbox: Outbox, named: Sequence[str]) -> None:
        self._outbox, self._named = outbox, list(named)
        self._heard_s = {name: time.monotonic() - silent_s for name, silent_s in _silent_s(outbox).items()}
        self._kept_s = time.monotonic()
        self._again_s, self._again_delay_s = 0.0, AGAIN_FIRST_S
        self._round = (0, 0)  # the rows above the first `seq` up to the second one were sent again last
        self._doubted: int | None = 0  # the last row that counts as not stored, None after all
        self._has_told = False

    @property
    def _is_any_known(self) -> bool:
        return bool(self._named or self._heard_s)

    def awaited(self, row: Row) -> bool:
        """Return whether a collector must store this message before it is deleted; only results are acknowledged."""
        return self._is_any_known and "/result/" in row.topic

    def take(self, name: str, body: bytes) -> str | None:
        """Apply an acknowledgement; one that is malformed or proves nothing changes nothing.

        Returns, once, that a collector's acknowledgements have no digests.
        """
        try:
            ack = msgspec.json.decode(body, type=Ack)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        digests = self._digests(name, ack)
        if digests is None:
            return self._tell_unproven(name)
        if self._outbox.mark_stored(digests):
            self._hear(name)
            self._look_sooner()
        return None

    def _digests(self, name: str, ack: Ack) -> Mapping[str, str | None] | None:
        """Return the digests by key, None if they are missing."""
        if not ack.digests and name in self._named:
            return dict.fromkeys(ack.keys)
        return dict(zip(ack.keys, ack.digests, strict=True)) if len(ack.keys) == len(ack.digests) else None

    def _tell_unproven(self, name: str) -> str | None:
        if self._has_told or not is_name(name):
            return None
        self._has_told = True
        return f"acknowledgements of {name} without digests are ignored: upgrade it, or name it in [mqtt] collectors"

    def _hear(self, name: str) -> None:
        was_any_known, now_s = self._is_any_known, time.monotonic()
        if is_name(name) and (name in self._heard_s or len(self._heard_s) < MAX_KNOWN):
            silent_s = now_s - self._heard_s.get(name, -math.inf)
            self._heard_s[name] = now_s
            if silent_s > KEEP_S:
                self._keep(now_s)
        if not was_any_known:
            self._doubted, self._again_s = 0, 0.0

    def _look_sooner(self) -> None:
        """Send again in half a minute at most, at once if all that was last sent again is stored."""
        self._again_delay_s = AGAIN_FIRST_S
        self._again_s = min(self._again_s, time.monotonic() + AGAIN_FIRST_S)
        if self._round[1] and self._outbox.is_stored(*self._round):
            self._again_s = 0.0

    def send_again(self, now_s: float) -> bool:
        """Mark unstored results as pending again, with growing delays: the broker may have lost them. Return if any.

        They go in order, a limited number each time, and from the first one again after the last one. Those that were
        sent before a collector was known count as not stored, too.
        """
        if self._is_any_known and self._doubted is not None:
            self._doubted = self._outbox.doubt_sent(self._doubted)
        if now_s < self._again_s:
            return False
        self._again_s = now_s + self._again_delay_s
        self._again_delay_s = min(2 * self._again_delay_s, AGAIN_LAST_S)
        after = self._round[1]
        last = self._outbox.send_unstored(after)
        if last is None and after:
            after, last = 0, self._outbox.send_unstored()
        self._round = (after, last or 0)
        return last is not None

    def expire(self, now_s: float) -> str | None:
        """Forget collectors silent for too long at the monotonic time `now_s`; return the consequence, None if none."""
        gone = [name for name, heard_s in self._heard_s.items() if now_s - heard_s > KNOWN_S]
        for name in gone:
            del self._heard_s[name]
        if gone or (self._heard_s and now_s - self._kept_s > KEEP_S):
            self._keep(now_s)
        if not gone or self._is_any_known:
            return None
        rows = self._outbox.expect_no_collector()
        return f"no acknowledgement from {', '.join(gone)} for seven days: {rows} results now count as sent"

    def _keep(self, now_s: float) -> None:
        silent_s = {name: round(now_s - heard_s) for name, heard_s in sorted(self._heard_s.items())}
        self._outbox.keep({SILENT: msgspec.json.encode(silent_s)})
        self._kept_s = now_s


def _silent_s(outbox: Outbox) -> dict[str, float]:
    """Return how long each known collector has been silent."""
    kept = outbox.kept(SILENT)
    if kept is None:
        return dict.fromkeys(msgspec.json.decode(outbox.kept(NAMES) or b"[]", type=list[str]), 0.0)
    return msgspec.json.decode(kept, type=dict[str, float])

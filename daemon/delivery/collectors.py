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
REASON_CHARS = 200
KEEP_S = 3600.0  # the stored times may be this old
NAMES = "collectors"  # the key that an earlier version used
SILENT = "collectors_silent_s"


class Ack(Struct, frozen=True):
    """A collector's acknowledgement of the results that it has stored; `unread`: those it cannot read, and why.

    `digests` has the SHA-256 of each one's bytes, in hex, first of `keys`, then of `unread`: it proves that the sender
    has received them. Only a collector that the device's configuration names may leave them out.
    """

    keys: list[str]
    unread: dict[str, str] = {}
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
        self._unread_s, self._unread_to = 0.0, 0
        self._told: set[tuple[str, str]] = set()  # which event of which collector was reported

    @property
    def _is_any_known(self) -> bool:
        return bool(self._named or self._heard_s)

    def awaited(self, row: Row) -> bool:
        """Return whether a collector must store this message before it is deleted; only results are acknowledged."""
        return self._is_any_known and "/result/" in row.topic

    def take(self, name: str, body: bytes) -> tuple[str, str] | None:
        """Apply an acknowledgement; one that is malformed or proves nothing changes nothing.

        Returns, once, an event and its detail: that a collector cannot read something, or gives no digests.
        """
        try:
            ack = msgspec.json.decode(body, type=Ack)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        digests = self._digests(name, ack)
        if digests is None:
            detail = f"acknowledgements of {name} without digests: upgrade it, or name it in [mqtt] collectors"
            return self._tell("acknowledgement_ignored", name, detail)
        unread = self._outbox.mark_unread({key: digests[key] for key in ack.unread})
        stored = self._outbox.mark_stored({key: digests[key] for key in ack.keys})
        if stored or unread:
            self._hear(name)
        if stored:
            self._look_sooner()
        if not unread:
            return None
        reason = next(iter(ack.unread.values()))[:REASON_CHARS]
        detail = f"{name} cannot read {unread} results ({reason}); they are kept and sent again every hour"
        return self._tell("not_stored", name, detail)

    def _digests(self, name: str, ack: Ack) -> Mapping[str, str | None] | None:
        """Return the digests by key, None if they are missing."""
        keys = [*ack.keys, *ack.unread]
        if not ack.digests and name in self._named:
            return dict.fromkeys(keys)
        return dict(zip(keys, ack.digests, strict=True)) if len(keys) == len(ack.digests) else None

    def _tell(self, event: str, name: str, detail: str) -> tuple[str, str] | None:
        if not is_name(name) or (event, name) in self._told or len(self._told) == MAX_KNOWN:
            return None
        self._told.add((event, name))
        return event, detail

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
        sent before a collector was known count as not stored, too. Those that a collector could not read wait for its
        next version, whatever else it stores meanwhile.
        """
        if self._is_any_known and self._doubted is not None:
            self._doubted = self._outbox.doubt_sent(self._doubted)
        sent = False
        if now_s >= self._again_s:
            self._again_s = now_s + self._again_delay_s
            self._again_delay_s = min(2 * self._again_delay_s, AGAIN_LAST_S)
            self._round = self._send_next(self._round[1])
            sent = self._round[1] > 0
        if now_s >= self._unread_s:
            self._unread_s = now_s + AGAIN_LAST_S
            _, self._unread_to = self._send_next(self._unread_to, unread=True)
            sent = sent or self._unread_to > 0
        return sent

    def _send_next(self, after: int, *, unread: bool = False) -> tuple[int, int]:
        """Mark the next rows above `after` as pending, the first ones after the last; return their range of `seq`."""
        last = self._outbox.send_unstored(after, unread=unread)
        if last is None and after:
            after, last = 0, self._outbox.send_unstored(unread=unread)
        return after, last or 0

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
    if outbox.kept(SILENT) is None:
        names: list[str] = outbox.kept_as(NAMES, msgspec.json.Decoder(list[str]).decode, [])
        return dict.fromkeys(names, 0.0)
    return outbox.kept_as(SILENT, msgspec.json.Decoder(dict[str, float]).decode, {})

"""The known collectors and what they have stored: while there is one, a broker's acknowledgement is not enough."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.outbox import Outbox, Row
from benchd.daemon.delivery.topics import is_name

KNOWN_S = 7 * 86400.0
MAX_KNOWN = 16
AGAIN_FIRST_S, AGAIN_LAST_S = 30.0, 3600.0
REASON_CHARS = 200
KEEP_S = 3600.0  # the stored times may be this old
SILENT = "collectors_silent_s"


class Ack(Struct, frozen=True):
    """A collector's acknowledgement of the results that it has stored; `unread`: those it cannot read, and why.

    `digests` has the SHA-256 of the bytes of each of both, in hex by key, which proves that the sender has received
    them. Only a collector that the device's configuration names may leave them out.
    """

    keys: list[str]
    unread: dict[str, str] = {}
    digests: dict[str, str] = {}


class Collectors:
    """The collectors named in the configuration, and those that stored something in the last seven days of uptime.

    Uptime, because setting the clock must not drop a collector together with everything that waits for it.
    """

    def __init__(self, outbox: Outbox, named: Sequence[str]) -> None:
        self._outbox, self._named = outbox, list(named)
        silent_s: dict[str, float] = outbox.kept_as(SILENT, msgspec.json.Decoder(dict[str, float]).decode, {})
        self._heard_s = {name: time.monotonic() - one_s for name, one_s in silent_s.items()}
        self._kept_s = time.monotonic()
        self._again_s, self._again_delay_s = 0.0, AGAIN_FIRST_S
        self._unread_s = 0.0
        self._told: set[str] = set()  # collectors whose unread results were reported
        self._round = (0, 0)  # the rows above the first `seq` up to the second one were sent again last
        self._doubted: int | None = 0  # the last row that counts as not stored, None after all
        self._is_unproven_told = False

    @property
    def _is_any_known(self) -> bool:
        return bool(self._named or self._heard_s)

    def awaited(self, row: Row) -> bool:
        """Return whether a collector must store this message before it is deleted; only results are acknowledged."""
        return self._is_any_known and "/result/" in row.topic

    def take(self, name: str, body: bytes) -> tuple[str, str] | None:
        """Apply an acknowledgement; one that is malformed or proves nothing changes nothing.

        Returns an event and its text: once per collector, that it cannot read something, and, once, that
        acknowledgements have no digests.
        """
        try:
            ack = msgspec.json.decode(body, type=Ack)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if not is_name(name):
            return None
        if not ack.digests and name not in self._named:
            return self._tell_unproven(name) if ack.keys or ack.unread else None
        stored = self._outbox.mark_stored(self._digests(name, ack, ack.keys))
        unread = self._outbox.mark_unread(self._digests(name, ack, ack.unread))
        if stored or unread:
            self._hear(name)
            self._look_sooner()
        return self._tell_unread(name, unread, next(iter(ack.unread.values()))) if unread else None

    def _digests(self, name: str, ack: Ack, keys: Iterable[str]) -> Mapping[str, str | None]:
        """Return the digest of each key that has one; None stands for one that is not required."""
        if not ack.digests and name in self._named:
            return dict.fromkeys(keys)
        return {key: ack.digests[key] for key in keys if key in ack.digests}

    def _tell_unproven(self, name: str) -> tuple[str, str] | None:
        if self._is_unproven_told:
            return None
        self._is_unproven_told = True
        advice = "upgrade it, or name it in [mqtt] collectors"
        return "acknowledgement_ignored", f"acknowledgements of {name} without digests are ignored: {advice}"

    def _tell_unread(self, name: str, count: int, reason: str) -> tuple[str, str] | None:
        if name in self._told or len(self._told) == MAX_KNOWN:
            return None
        self._told.add(name)
        kept = f"{name} cannot read {count} results ({reason[:REASON_CHARS]}); they are kept and sent again every hour"
        return "not_stored", kept

    def _hear(self, name: str) -> None:
        was_any_known, now_s = self._is_any_known, time.monotonic()
        if name in self._heard_s or len(self._heard_s) < MAX_KNOWN:
            silent_s = now_s - self._heard_s.get(name, -math.inf)
            self._heard_s[name] = now_s
            if silent_s > KEEP_S:
                self._keep(now_s)
        if not was_any_known:
            self._doubted, self._again_s = 0, 0.0

    def _look_sooner(self) -> None:
        """Send again in half a minute at most, at once if all that was last sent again is stored or cannot be read."""
        self._again_delay_s = AGAIN_FIRST_S
        self._again_s = min(self._again_s, time.monotonic() + AGAIN_FIRST_S)
        if self._round[1] and self._outbox.is_stored(*self._round):
            self._again_s = 0.0

    def send_again(self, now_s: float) -> bool:
        """Mark unstored results as pending again, with growing delays: the broker may have lost them. Return if any.

        They go in order, a limited number each time, and from the first one again after the last one. Those that were
        sent before a collector was known count as not stored, too. Those that a collector could not read wait for its
        next version, whatever else it stores meanwhile: they go every hour.
        """
        if self._is_any_known and self._doubted is not None:
            self._doubted = self._outbox.doubt_sent(self._doubted)
        is_any = False
        if now_s >= self._unread_s:
            self._unread_s = now_s + AGAIN_LAST_S
            is_any = self._outbox.send_unread() > 0
        return self._send_round(now_s) or is_any

    def _send_round(self, now_s: float) -> bool:
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

"""Which collectors are known, and what they have stored: as long as one is, a broker's word is not the last one."""

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
KEEP_S = 3600.0  # by which what is kept may be behind
NAMES = "collectors"  # as an earlier version kept them
SILENT = "collectors_silent_s"


class Ack(Struct, frozen=True):
    """What a collector says that it has stored."""

    keys: list[str]


class Collectors:
    """Those named in the configuration, and those heard of within seven days in which the service ran.

    Its own time, because a clock that is set must not forget a collector with everything that waits for it.
    """

    def __init__(self, outbox: Outbox, named: Sequence[str]) -> None:
        self._outbox, self._named = outbox, list(named)
        self._heard_s = {name: time.monotonic() - silent_s for name, silent_s in _silent_s(outbox).items()}
        self._kept_s = time.monotonic()
        self._again_s, self._again_delay_s = 0.0, AGAIN_FIRST_S

    def awaited(self, row: Row) -> bool:
        """Say whether a collector has to store this message before it may go; only results are acknowledged."""
        return bool(self._named or self._heard_s) and "/result/" in row.topic

    def take(self, name: str, body: bytes) -> None:
        """Take an acknowledgement; what is none changes nothing."""
        try:
            keys = msgspec.json.decode(body, type=Ack).keys
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if is_name(name) and (name in self._heard_s or len(self._heard_s) < MAX_KNOWN):
            silent_s = time.monotonic() - self._heard_s.get(name, -math.inf)
            self._heard_s[name] = time.monotonic()
            if silent_s > KEEP_S:
                self._keep(time.monotonic())
        self._outbox.mark_stored(keys)
        self._again_delay_s = AGAIN_FIRST_S
        self._again_s = time.monotonic() + AGAIN_FIRST_S

    def send_again(self, now_s: float) -> bool:
        """Make pending, later and later, what nobody has stored: the broker may have lost it; say whether any was."""
        if now_s < self._again_s:
            return False
        self._again_s = now_s + self._again_delay_s
        self._again_delay_s = min(2 * self._again_delay_s, AGAIN_LAST_S)
        return self._outbox.send_unstored() > 0

    def expire(self, now_s: float) -> str | None:
        """Forget who was not heard of at the monotonic time `now_s`; return what that means, None where nothing."""
        gone = [name for name, heard_s in self._heard_s.items() if now_s - heard_s > KNOWN_S]
        for name in gone:
            del self._heard_s[name]
        if gone or (self._heard_s and now_s - self._kept_s > KEEP_S):
            self._keep(now_s)
        if not gone or self._heard_s or self._named:
            return None
        rows = self._outbox.expect_no_collector()
        return f"no acknowledgement from {', '.join(gone)} in seven days: {rows} results count as sent"

    def _keep(self, now_s: float) -> None:
        silent_s = {name: round(now_s - heard_s) for name, heard_s in sorted(self._heard_s.items())}
        self._outbox.keep({SILENT: msgspec.json.encode(silent_s)})
        self._kept_s = now_s


def _silent_s(outbox: Outbox) -> dict[str, float]:
    """Return for how long each known collector has said nothing."""
    kept = outbox.kept(SILENT)
    if kept is None:
        return dict.fromkeys(msgspec.json.decode(outbox.kept(NAMES) or b"[]", type=list[str]), 0.0)
    return msgspec.json.decode(kept, type=dict[str, float])

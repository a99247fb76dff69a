"""Sends an outbox to a broker: a message counts as sent once the broker acknowledges it."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from benchd.daemon.delivery.broker import Broker, Ended
from benchd.daemon.delivery.messages import RESULT_BYTES
from benchd.daemon.delivery.outbox import STREAM, Outbox, Row
from benchd.daemon.delivery.session import ABOUT_THE_SENDER, QUOTA_EXCEEDED, Numbered, Session, Unsendable, connect


class DrainReport(NamedTuple):
    """The result of one attempt. `left` are still pending; `reason` says why not all were sent, None if all were."""

    sent: int
    refused: int
    left: int
    reason: str | None


def drain(outbox: Outbox, broker: Broker, client_id: str, timeout_s: float) -> DrainReport:
    """Send pending messages, in order and each at most once, and return the result within `timeout_s`.

    A failure of the network or the broker is a reason in the report, never an exception.
    """
    deadline = time.monotonic() + timeout_s
    sender = Sender(outbox)
    if outbox.counts().pending:
        try:
            with closing(connect(broker, client_id, deadline)) as session:
                sender.send_all(session)
        except Ended as end:
            sender.reason = str(end)
    return DrainReport(sender.sent, sender.refused, outbox.counts().pending, sender.reason)


class Sender:
    """Moves rows from the outbox to a session and their acknowledgements back.

    `awaits_storage` says which rows a collector must still store after the broker's acknowledgement.
    """

    def __init__(self, outbox: Outbox, awaits_storage: Callable[[Row], bool] = lambda row: False) -> None:
        self._outbox, self._awaits_storage = outbox, awaits_storage
        self._stream = (outbox.kept(STREAM) or b"").decode()
        self._waiting: dict[int, Row] = {}  # by packet id
        self._last_seq = 0  # each is sent once per session, even if it stays pending
        self.stopped = False
        self.sent = self.refused = 0
        self.reason: str | None = None

    @property
    def waiting(self) -> int:
        """Return how many messages are in flight."""
        return len(self._waiting)

    def send_all(self, session: Session) -> None:
        """Send all pending messages and wait for the last acknowledgement."""
        while True:
            self.fill(session)
            if not self._waiting:
                return
            session.step()
            self.settle(session)

    def fill(self, session: Session) -> None:
        """Send pending messages, in order, as far as the window allows."""
        while not self.stopped and (free := session.free) > 0:
            rows = self._outbox.pending(free, after=self._last_seq)
            if not rows:
                return
            self._last_seq = rows[-1].seq
            for row in rows:
                self._send(session, row)

    def begin_again(self) -> None:
        """Start again from the first pending message, including sent ones that are pending again."""
        self._last_seq = 0

    def _send(self, session: Session, row: Row) -> None:
        if len(row.body) > RESULT_BYTES and self._awaits_storage(row):
            self._refuse(row.seq, f"{len(row.body)} bytes, but a collector accepts records of at most {RESULT_BYTES}")
            return
        try:
            numbered = Numbered(self._stream, row.number) if row.number else None
            self._waiting[session.publish(row.topic, row.body, row.qos, numbered=numbered)] = row
        except Unsendable as error:
            self._refuse(row.seq, str(error))

    def settle(self, session: Session) -> None:
        """Record the acknowledgements received so far, in one commit."""
        sent = []
        for packet_id, reason in session.take_acknowledged():
            row = self._waiting.pop(packet_id, None)
            if row is None:  # not one of ours
                continue
            if reason.value == QUOTA_EXCEEDED:
                self.stopped, self.reason = True, f"{session.address} accepts no more messages for now: {reason}"
            elif reason.is_failure:
                may_retry = reason.value in ABOUT_THE_SENDER
                self._refuse(row.seq, f"{session.address} refused it: {reason}", may_retry=may_retry)
            else:
                sent.append(row)
        for unstored in (False, True):
            seqs = [row.seq for row in sent if self._awaits_storage(row) == unstored]
            if seqs:
                self._outbox.mark_sent(*seqs, at_s=time.time(), unstored=unstored)
        self.sent += len(sent)

    def _refuse(self, seq: int, reason: str, *, may_retry: bool = False) -> None:
        self._outbox.mark_refused(seq, reason, may_retry=may_retry)
        self.refused += 1
        self.reason = self.reason or reason

"""The sinks that keep and publish records: the journal for people, the outbox and its broker for machines."""

import uuid
from pathlib import Path
from typing import TextIO

from benchd.daemon.config import MqttConfig
from benchd.daemon.delivery.broker import Broker, configured
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.delivery.sender import drain
from benchd.daemon.delivery.topics import RESULT_QOS, Topics
from benchd.daemon.journal import Journal
from benchd.daemon.measuring.session import Sink
from benchd.daemon.records import Record
from benchd.daemon.verdicts.results import JOURNAL

JOURNAL_BYTES = 64 * 2**20


class JournalSink(Sink):
    """Appends each record to `records.jsonl`, on the disk before the next case begins, on a full one by a reserve."""

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        self._journal, self._reserve = Journal(path), reserve

    def publish(self, record: Record, body: bytes) -> None:
        """Append the record."""
        if self._reserve:
            self._reserve.write(lambda: self._journal.append(body))
        else:
            self._journal.append(body)

    def put_away(self, folder: Path, now_s: float, from_bytes: int = JOURNAL_BYTES) -> None:
        """Move a journal that has grown so long to `folder` and begin a new one; raise UsageError where it won't go."""
        if self._journal.size_bytes() >= from_bytes:
            self._journal.move(folder / f"records-{now_s:.0f}.jsonl")


class MqttSink(Sink):
    """Commits each record to the outbox and sends what is pending; a broker that is down costs a warning."""

    def __init__(self, broker: Broker, timeout_s: float, folder: Path, err: TextIO) -> None:
        self._broker, self._timeout_s, self._folder, self._err = broker, timeout_s, folder, err
        self._outbox = Outbox(folder / "outbox.db")
        self._client_id = f"bench-once-{uuid.uuid4().hex[:12]}"  # of its own: the device's is the service's
        self._failure: str | None = None

    def publish(self, record: Record, body: bytes) -> None:
        """Commit the record, then send; after a failure sending waits for the end of the pass."""
        self._outbox.add(record.key, Topics(record.device_id).result(record.run_id), RESULT_QOS, body)
        if not self._failure:
            self._failure = self._send()

    def end(self) -> None:
        """Try once more what is left, and say what to type where that fails too."""
        self._failure = self._failure and self._send()
        if self._failure:
            self._err.write(
                f"warning: not published: {self._failure}. Nothing is lost; send it later with\n"
                f"  benchd replay {self._folder} --mqtt {self._broker.url}\n"
            )
        self._outbox.close()

    def _send(self) -> str | None:
        """Send what is pending and return why not all was taken, else None."""
        report = drain(self._outbox, self._broker, self._client_id, self._timeout_s)
        return report.reason


def lasting(output: Path, mqtt: MqttConfig, err: TextIO, url: str | None = None) -> list[Sink]:
    """Return the sinks that keep records in `output` and send them to `url`, else to the configuration's broker."""
    url = url or mqtt.url
    sent: list[Sink] = [MqttSink(configured(url, mqtt), mqtt.timeout_s, output, err)] if url else []
    return [*sent, JournalSink(output / JOURNAL)]

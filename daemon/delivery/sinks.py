"""The sinks that store and publish records: the journal for people, the outbox and its broker for machines."""

import shlex
import uuid
from pathlib import Path
from typing import TextIO

from benchd.daemon.config import MqttConfig
from benchd.daemon.delivery.broker import Broker, configured
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.outbox import OUTBOX, Outbox
from benchd.daemon.delivery.sender import drain
from benchd.daemon.delivery.topics import RESULT_QOS, Topics
from benchd.daemon.journal import Journal
from benchd.daemon.measuring.session import Sink
from benchd.daemon.records import Record
from benchd.daemon.verdicts.results import JOURNAL

JOURNAL_BYTES = 64 * 2**20


class JournalSink(Sink):
    """Appends each record to `records.jsonl`, synced before the next case begins.

    A full disk uses the reserve, if there is one; a record that does not fit even so is owed until `settle` succeeds.
    """

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        self._journal, self._reserve = Journal(path), reserve
        self._owed: list[bytes] = []

    @property
    def owes(self) -> bool:
        """Return whether a record has not been written yet."""
        return bool(self._owed)

    def publish(self, record: Record, body: bytes) -> None:
        """Append the record."""
        if self._reserve:
            self._owed.append(body)
            self.settle()
        else:
            self._journal.append(body)

    def settle(self) -> None:
        """Append the owed records in order; raise as the journal does if the disk is still full."""
        while self._reserve and self._owed:
            self._reserve.write(lambda: self._journal.append(self._owed[0]))
            del self._owed[0]

    def put_away(self, folder: Path, now_s: float, from_bytes: int = JOURNAL_BYTES) -> None:
        """Move a journal of at least `from_bytes` to `folder` and start a new one; raise UsageError if that fails."""
        if self._journal.size_bytes() >= from_bytes:
            self._journal.move(folder / f"records-{now_s:.0f}.jsonl")

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


class MqttSink(Sink):
    """Commits each record to the outbox and sends pending ones; an unreachable broker causes only a warning."""

    def __init__(self, broker: Broker, timeout_s: float, folder: Path, err: TextIO) -> None:
        self._broker, self._timeout_s, self._folder, self._err = broker, timeout_s, folder, err
        self._outbox = Outbox(folder / OUTBOX)
        self._client_id = f"bench-once-{uuid.uuid4().hex[:12]}"  # not the device's id, which the service uses
        self._failure: str | None = None

    def publish(self, record: Record, body: bytes) -> None:
        """Commit the record, then send; after a failure, sending waits for the end of the run."""
        self._outbox.add(record.key, Topics(record.device_id).result(record.run_id), RESULT_QOS, body)
        if not self._failure:
            self._failure = self._send()

    def end(self) -> None:
        """Retry unsent records, and print the command to type if that fails too or the broker has refused any."""
        if not self._failure:
            return
        failure, refused = self._send(), self._outbox.refused()
        if failure or refused:
            again = shlex.join([*self._again(), *(["--dead"] if refused else [])])
            reason = failure or refused[0].reason
            self._err.write(f"warning: not published: {reason}. Nothing is lost; send it later with\n  {again}\n")

    def _again(self) -> list[str]:
        """Return the command that sends pending records to this broker; the password comes from the environment."""
        to = self._broker
        files = {"--ca-file": to.ca_file, "--certificate-file": to.certificate_file, "--key-file": to.key_file}
        given = [word for option, path in files.items() if path for word in (option, path)]
        return ["benchd", "replay", str(self._folder), "--mqtt", to.url, *given]

    def close(self) -> None:
        """Close the outbox."""
        self._outbox.close()

    def _send(self) -> str | None:
        """Send pending records and return why not all were accepted, else None."""
        return drain(self._outbox, self._broker, self._client_id, self._timeout_s).reason


def lasting(output: Path, mqtt: MqttConfig, err: TextIO, url: str | None = None) -> list[Sink]:
    """Return the sinks that store records in `output` and send them to `url`, else to the configured broker."""
    url = url or mqtt.url
    sent: list[Sink] = [MqttSink(configured(url, mqtt), mqtt.timeout_s, output, err)] if url else []
    return [JournalSink(output / JOURNAL), *sent]  # what only the journal has, `benchd replay` adds to the outbox

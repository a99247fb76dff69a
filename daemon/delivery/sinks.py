"""The sinks of a measuring command: the log in its output folder, and the broker that it is sent to."""

import shlex
import uuid
from pathlib import Path
from typing import TextIO

from benchd.daemon.config import MqttConfig
from benchd.daemon.delivery.broker import Broker, configured
from benchd.daemon.delivery.delivery import Delivery
from benchd.daemon.delivery.log import Log
from benchd.daemon.measuring.session import Sink
from benchd.daemon.records import Record
from benchd.daemon.verdicts.results import JOURNAL


class LogSink(Sink):
    """Appends each record to `records.jsonl`, synced before the next case begins."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def publish(self, record: Record, body: bytes) -> None:
        """Append the record."""
        self._log.append(body)

    def close(self) -> None:
        """Close the log."""
        self._log.close()


class MqttSink(Sink):
    """Sends pending lines of the log after each record; an unreachable broker only causes a warning."""

    def __init__(self, broker: Broker, timeout_s: float, folder: Path, log: Log, err: TextIO) -> None:
        self._broker, self._timeout_s, self._folder, self._err = broker, timeout_s, folder, err
        self._delivery = Delivery(folder, log)
        # must differ from the device's id, which the service uses
        self._client_id = f"bench-once-{uuid.uuid4().hex[:12]}"
        self._failure: str | None = None

    def publish(self, record: Record, body: bytes) -> None:
        """Send pending lines; after a failure, the next attempt is at the end of the run."""
        if not self._failure:
            self._failure = self._send()

    def end(self) -> None:
        """Try again; if that also fails, or the broker has refused anything, print the command to run later."""
        if self._failure and (failure := self._send()):
            again = shlex.join(self._again())
            self._err.write(f"warning: not published: {failure}. Nothing is lost; send it later with\n  {again}\n")

    def _again(self) -> list[str]:
        """Return the command that sends pending records to this broker; the password comes from the environment."""
        to = self._broker
        files = {"--ca-file": to.ca_file, "--certificate-file": to.certificate_file, "--key-file": to.key_file}
        given = [word for option, path in files.items() if path for word in (option, path)]
        return ["benchd", "replay", str(self._folder), "--mqtt", to.url, *given]

    def _send(self) -> str | None:
        return self._delivery.drain(self._broker, self._client_id, self._timeout_s)


def lasting(output: Path, mqtt: MqttConfig, err: TextIO, url: str | None = None) -> list[Sink]:
    """Return the sinks that store records in `output` and send them to `url`, or else to the configured broker."""
    url = url or mqtt.url
    broker = configured(url, mqtt) if url else None
    log = Log(output / JOURNAL)
    return [LogSink(log), *([MqttSink(broker, mqtt.timeout_s, output, log, err)] if broker else [])]

"""A device without a measurement: it delivers results that it is given, as the service does, and answers a replay."""

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchd.daemon.delivery.broker import Broker, parse_url
from benchd.daemon.delivery.commands import Gate, ReplayParameters
from benchd.daemon.delivery.delivery import Delivery
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.topics import Topics

HEALTH_S = 1.0


class Board:
    """A link with its logs in `folder`; `attend` must be called often."""

    def __init__(self, broker: Broker, folder: Path, device_id: str) -> None:
        self._topics = Topics(device_id)
        self.records, self.events = Log(folder / "records.jsonl"), Log(folder / "events.jsonl")
        self.delivery = Delivery(folder, self.records, self.events, device_id)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.link = Link(broker, self._topics, self.delivery, "boot", self._writer)
        self._gate = Gate(self._topics)
        self._health_s = 0.0
        self.link.start()

    def attend(self) -> None:
        """Carry out replays, and say how far the logs have come."""
        while self.link.state.commands:
            now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            command = self._gate.take(self.link.state.commands.popleft(), now_s, time.time())
            if command and not command.refusal and isinstance(command.parameters, ReplayParameters):
                self.delivery.replay(command.parameters.log, command.parameters.first, command.parameters.last)
        if time.monotonic() >= self._health_s:
            self._health_s = time.monotonic() + HEALTH_S
            self.link.retain(self._topics.of("health"), msgspec.json.encode(self._health()))

    def _health(self) -> dict[str, str | int]:
        return {
            "schema": "benchd.health/1",
            "log": self.records.id,
            "first_seq": self.records.first_seq(),
            "last_seq": self.records.last_seq,
            "event_log": self.events.id,
            "event_first_seq": self.events.first_seq(),
            "event_last_seq": self.events.last_seq,
            "pending": self.delivery.pending,
            "refused": len(self.delivery.refused),
        }

    def close(self) -> None:
        """Send what is pending for a few seconds, and end."""
        self.link.stop()
        for closable in (self.records, self.events, self._reader, self._writer):
            closable.close()


def serve(url: str, folder: str, device_id: str, append: Callable[[Log], bool], pause_s: float) -> None:
    """Deliver for ever what `append` puts into the log, which is called once per pause until it returns False."""
    board, goes_on = Board(parse_url(url), Path(folder), device_id), True
    while True:
        goes_on = goes_on and append(board.records)
        board.attend()
        time.sleep(pause_s)


def follow(url: str, folder: str, device_id: str, results: str) -> None:
    """Deliver the lines of the file `results`, which may grow, each once."""
    path = Path(results)

    def append(log: Log) -> bool:
        for line in path.read_bytes().splitlines()[log.last_seq :] if path.exists() else ():
            log.append(line)
        return True

    serve(url, folder, device_id, append, 0.05)


if __name__ == "__main__":
    follow(*sys.argv[1:])

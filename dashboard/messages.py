"""Parses the devices' messages into rows for the store; pure, and never raises an error, whatever the body."""

import hashlib
import math
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from benchd.daemon.delivery import topics
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.log import HEAD
from benchd.daemon.delivery.messages import DeployedFolder, Event, Health, Info, Latest, Status, Telemetry
from benchd.daemon.errors import BenchdError
from benchd.daemon.records import Record
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.rows import columns
from benchd.daemon.verdicts.when import measured_s
from benchd.dashboard import limits

TEXT_LIMIT = 512  # bytes in a searchable column: PostgreSQL indexes at most 2,704 bytes, in up to four of these columns
ID_LIMIT = TEXT_LIMIT - 33  # for a device, because a key also contains a run id of 32 characters
NAME_CHARACTERS = 32  # maximum length of an event's name
INTEGER_LIMIT = 2**63  # the range of both databases
CLEARED = b"{}"  # the body of a document whose topic its device has cleared
READER = version("benchd")  # a later version may be able to read messages that this one quarantines

_Rows = Iterator[tuple[str, dict[str, Any]]]
_Reader = Callable[[topics.Address, IncomingMessage], _Rows]


class TableRow(NamedTuple):
    """One row for `table`, by column name."""

    table: str
    values: dict[str, Any]


class Result(NamedTuple):
    """The fields of a Record that tables show; energy is per inference and gross, times are in milliseconds.

    `measured_s` is by the device's clock, or equals `arrived_s` if that clock cannot have been right. `computes` is
    `cpu` or `cuda`, and `threads` is None for a worker that died before reporting its environment.
    """

    key: str
    device_id: str
    run_id: str
    suite_id: str
    case_id: str
    model: str
    variant: str
    batch_size: int
    status: str
    reason: str | None
    t_wall: str
    arrived_s: float
    measured_s: float
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None
    p99_ms: float | None
    throughput_per_s: float | None
    energy_mj: float | None
    energy_err_mj: float | None
    energy_scope: str | None
    checked: str | None
    x_of_floor: float | None
    flags: str
    hardware: str
    computes: str
    power_mode: str | None
    driver: str | None
    jetpack: str | None
    l4t: str | None
    threads: int | None
    fingerprint: str
    tool_version: str
    accuracy_metric: str | None
    accuracy_value: float | None
    accuracy_low: float | None
    accuracy_high: float | None
    accuracy_drop: float | None


class _UnreadableBody(Exception):
    """A body that does not match its topic; the message is the reason."""


def rows(message: IncomingMessage) -> list[TableRow]:
    """Return the rows of a message; an unreadable message becomes a row in quarantine, with the reason.

    A message beyond the limits of its kind is quarantined without its body, once per topic.
    """
    address = _address(message.topic)
    arrived = _arrived(address, message)
    try:
        limits.check(address.kind if address else "", message.body)
        if address is None or address.kind not in _READERS:
            raise _UnreadableBody("not a benchd topic")
        stored = [
            TableRow(*row) for row in _READERS[address.kind](address, message._replace(body=_plain(address, message)))
        ]
        for row in stored:
            _refuse_unstorable(row)
    except limits.TooLarge as error:
        return [quarantined(message._replace(body=b""), str(error)), *arrived]
    except (_UnreadableBody, BenchdError, ValueError, OverflowError, RecursionError) as error:
        return [quarantined(message, str(error)), *arrived]
    except Exception as error:  # a bug here must affect only one message, not the collector
        return [quarantined(message, f"{type(error).__name__}: {error}"), *arrived]
    # may be the will of a silent device
    is_offline = address.kind == "status" and stored[0].values["state"] == "offline"
    seen_s = None if message.retained or is_offline or not message.body else message.arrived_s
    return [*stored, *arrived, TableRow("device", {"device_id": address.device_id, "seen_s": seen_s})]


def _address(topic: str) -> topics.Address | None:
    """Parse a topic; return None for a different application's, or one with an id that no table can store."""
    address = topics.parse(topic)
    return address if address and len(address.device_id) <= ID_LIMIT else None


def _arrived(address: topics.Address | None, message: IncomingMessage) -> list[TableRow]:
    """Return the number of a result or event, if any; even quarantined ones are not requested again."""
    if address is None or address.kind not in ("result", "event") or not (numbers := HEAD.match(message.body)):
        return []
    seq = int(numbers[2])
    return [TableRow("span", {"device_id": address.device_id, "log": numbers[1].decode(), "first": seq, "last": seq})]


def _plain(address: topics.Address, message: IncomingMessage) -> bytes:
    """Return the body with control and formatting characters replaced; a result's body is unchanged."""
    if address.kind == "result" or not results.has_special(message.body):
        return message.body
    given = msgspec.json.decode(message.body or b"{}")
    plain = results.printable(given)
    return message.body if plain == given else msgspec.json.encode(plain)


def _result(address: topics.Address, message: IncomingMessage) -> _Rows:
    record = results.decoded(message.body)
    if (record.device_id, record.run_id) != (address.device_id, address.leaf):
        raise _UnreadableBody(f"the record says it is {record.key}")
    yield "result", flat(record, message.arrived_s)._asdict()
    yield "body", {"key": record.key, "body": message.body}


def flat(record: Record, arrived_s: float) -> Result:
    """Return the fields of a record that tables show."""
    environment = record.environment
    own = {
        "key": record.key,
        "reason": record.reason.encode()[:TEXT_LIMIT].decode(errors="ignore") if record.reason else None,
        "arrived_s": arrived_s,
        "measured_s": measured_s(record.t_wall, arrived_s) or arrived_s,
        "energy_scope": record.energy.scope if record.energy else None,
        "checked": record.check.verdict if record.check else None,
        "flags": ", ".join(record.flags),
        "hardware": environment.gpu or environment.cpu_model,
        "computes": environment.device,
        "driver": environment.driver,
        "jetpack": environment.jetpack,
        "l4t": environment.l4t,
    }
    return Result(**columns(record, Result._fields) | own)


def _retained(kind: type[Struct], state: str = "") -> _Reader:
    """Return the reader of a document of a `kind`, whose field `state` becomes the document's state.

    An empty body clears what was retained: the document then has no state.
    """

    def read(address: topics.Address, message: IncomingMessage) -> _Rows:
        document = msgspec.json.decode(message.body, type=kind) if message.body else None
        # a retained message is not a late will, because the broker still has it
        is_over = message.retained and getattr(document, "state", "") == "offline"
        yield (
            "document",
            {
                "device_id": address.device_id,
                "kind": results.printable(f"{address.kind}/{address.leaf}" if address.leaf else address.kind),
                "body": message.body or CLEARED,
                "arrived_s": message.arrived_s,
                "state": getattr(document, state, None) or None,
                "session": "" if is_over else getattr(document, "session", ""),
            },
        )

    return read


def _telemetry(address: topics.Address, message: IncomingMessage) -> _Rows:
    """Yield one row with the last value of each metric."""
    samples = msgspec.json.decode(message.body, type=Telemetry).samples
    names = (f"{sample.metric}@{sample.rail}" if sample.rail else sample.metric for sample in samples)
    values = {name[:TEXT_LIMIT]: sample.value for name, sample in zip(names, samples, strict=True)}
    body = msgspec.json.encode(values)
    yield "telemetry", {"device_id": address.device_id, "t_s": message.arrived_s, "body": body}


def _event(address: topics.Address, message: IncomingMessage) -> _Rows:
    event = msgspec.json.decode(message.body, type=Event)
    yield (
        "event",
        {
            "key": _digest(message),
            "device_id": address.device_id,
            "name": event.event[:NAME_CHARACTERS],
            "arrived_s": message.arrived_s,
            "body": message.body,
        },
    )


_READERS: dict[str, _Reader] = {
    "result": _result,
    "status": _retained(Status, "state"),
    "info": _retained(Info),
    "health": _retained(Health),
    "latest": _retained(Latest, "verdict"),
    "shipped": _retained(DeployedFolder, "verdict"),
    "telemetry": _telemetry,
    "event": _event,
}


def _refuse_unstorable(row: TableRow) -> None:
    """Raise an error for a value that SQLite or PostgreSQL would reject, so that both store the same values."""
    for column, value in row.values.items():
        if isinstance(value, str) and (len(value.encode()) > TEXT_LIMIT or "\0" in value):
            raise _UnreadableBody(f"{column} is longer than {TEXT_LIMIT} bytes or contains a NUL")
        if isinstance(value, int) and abs(value) >= INTEGER_LIMIT:
            raise _UnreadableBody(f"{column} does not fit in 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise _UnreadableBody(f"{column} is not a finite number")


def quarantined(message: IncomingMessage, reason: str) -> TableRow:
    """Return the row for a message that cannot be stored as its topic requires."""
    return TableRow(
        "quarantine",
        {
            "key": _digest(message),
            "topic": message.topic[:TEXT_LIMIT],
            "reason": results.printable(reason)[:TEXT_LIMIT],
            "arrived_s": message.arrived_s,
            "body": message.body,
            "reader": READER,
        },
    )


def _digest(message: IncomingMessage) -> str:
    return hashlib.sha256(message.topic.encode() + b"\0" + message.body).hexdigest()

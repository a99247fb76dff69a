"""What devices publish, as a collector gets it and stores it."""

import json

from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.records import Record, encode
from benchd.dashboard.messages import rows


def message(device, kind, body, at_s, **fields):
    """Return a message of a device; `body` is its bytes, a record, or what JSON can hold."""
    if not isinstance(body, bytes):
        body = encode(body) if isinstance(body, Record) else json.dumps(body).encode()
    return IncomingMessage(f"benchd/v1/{device}/{kind}", body, at_s, **fields)


def result(record, at_s):
    """Return the message of a record."""
    return message(record.device_id, f"result/{record.run_id}", record, at_s)


def add(store, *messages):
    """Store messages in one transaction."""
    store.add(row for arrival in messages for row in rows(arrival))

"""Asks a device to run one of its own suites: only names that it has published."""

import time
import uuid
from contextlib import closing
from typing import Literal

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.broker import Broker, Ended
from benchd.daemon.delivery.session import Unsendable, connect
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.verdicts import results

ANSWER_S = 10.0
EXPIRY_S = 60
CLIENT = "page"


class _Said(Struct, frozen=True):
    """What a device answers."""

    accepted: bool
    reason: str | None = None


class Answer(_Said, frozen=True):
    """The device's answer; `reason` if it refuses, or why it did not answer, and `by` whose reason it is."""

    by: Literal["device", "broker", "nobody"] = "device"


def run_suite(broker: Broker, device_id: str, suite: str, timeout_s: float = ANSWER_S) -> Answer:
    """Request one suite and return the device's answer, or an answer that reports a timeout."""
    command_id, topics = uuid.uuid4().hex, Topics(device_id)
    command = {"id": command_id, "client": CLIENT, "suite": suite, "sent_s": time.time()}
    deadline = time.monotonic() + timeout_s
    try:
        with closing(connect(broker, f"benchd-page-{command_id}", deadline)) as session:
            session.subscribe([(topics.response(f"{CLIENT}/{command_id}"), 1)])
            session.publish(topics.command("run"), msgspec.json.encode(command), 1, expire_s=EXPIRY_S)
            session.endure()
            while (wait_s := deadline - time.monotonic()) > 0:
                session.step(wait_s=wait_s)
                for answer in session.take_received():
                    return _answer(answer.body)
    except (Ended, Unsendable) as error:
        return Answer(accepted=False, reason=str(error), by="broker")
    return Answer(accepted=False, reason=f"no answer within {timeout_s:g} s", by="nobody")


def _answer(body: bytes) -> Answer:
    try:
        said = msgspec.json.decode(body, type=_Said)
        return Answer(said.accepted, results.printable(said.reason))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Answer(accepted=False, reason="unreadable answer")

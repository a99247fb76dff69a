"""Asks a device to run one of its own suites: only names that it has published."""

import time
import uuid
from contextlib import closing
from typing import Literal, NamedTuple

import msgspec

from benchd.daemon.delivery.broker import Broker, Ended
from benchd.daemon.delivery.connection import Unsendable, connect
from benchd.daemon.delivery.messages import Response
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.verdicts import results

ANSWER_S = 10.0
EXPIRY_S = 60
CLIENT = "page"


class Answer(NamedTuple):
    """The device's answer; `reason` if it refuses, or why it did not answer, and `by` whose reason it is."""

    accepted: bool
    reason: str | None = None
    by: Literal["device", "broker", "nobody"] = "device"


def run_suite(broker: Broker, device_id: str, suite: str, timeout_s: float = ANSWER_S) -> Answer:
    """Request one suite and return the device's answer, or an answer that reports a timeout."""
    command_id, topics = uuid.uuid4().hex, Topics(device_id)
    command = {"id": command_id, "client": CLIENT, "suite": suite, "sent_s": time.time()}
    deadline = time.monotonic() + timeout_s
    try:
        with closing(connect(broker, f"benchd-page-{command_id}", deadline)) as connection:
            connection.subscribe([(topics.response(f"{CLIENT}/{command_id}"), 1)])
            connection.wait_subscribed(deadline)
            connection.publish(topics.command("run"), msgspec.json.encode(command), 1, expire_s=EXPIRY_S)
            while (wait_s := deadline - time.monotonic()) > 0:
                connection.turn(wait_s)
                for answer in connection.take_received():
                    return _answer(answer.body)
    except (Ended, Unsendable) as error:
        return Answer(accepted=False, reason=str(error), by="broker")
    return Answer(accepted=False, reason=f"no answer within {timeout_s:g} s", by="nobody")


def _answer(body: bytes) -> Answer:
    try:
        response = msgspec.json.decode(body, type=Response)
        return Answer(response.accepted, results.printable(response.reason))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Answer(accepted=False, reason="unreadable answer")

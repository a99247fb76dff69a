"""Asks a device to run a suite."""

import time
import uuid
from contextlib import closing

import msgspec

from benchd.daemon.delivery.broker import Broker, ConnectionEnded
from benchd.daemon.delivery.connection import Unsendable, connect
from benchd.daemon.delivery.messages import Response
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.verdicts import results
from benchd.dashboard.text import count, short

ANSWER_S = 10.0
EXPIRY_S = 60
CLIENT = "page"


def run_suite(broker: Broker, device_id: str, suite: str, timeout_s: float = ANSWER_S) -> str:
    """Request a suite and return the device's answer in words, or why there is none."""
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
                    return short(_words(answer.body))
    except (ConnectionEnded, Unsendable) as error:
        return short(f"not asked: {error}")
    return f"no answer within {timeout_s:g} s; the device may still accept it within {EXPIRY_S} s"


def _words(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body, type=Response)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "unreadable answer"
    return (
        f"accepted: {count(len(answer.cases), 'case')}"
        if answer.accepted
        else results.printable(f"refused: {answer.reason}")
    )

"""Asks a device to run a suite, and reports the outcome; the suite is not requested again while a request is open."""

import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from typing import Literal, NamedTuple

import msgspec

from benchd.daemon.delivery.broker import Broker, ConnectionEnded
from benchd.daemon.delivery.connection import Unsendable, connect
from benchd.daemon.delivery.messages import Response, SuiteInfo
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.verdicts import results
from benchd.dashboard.queries import Device, Mark
from benchd.dashboard.text import short

ANSWER_S = 10.0
EXPIRY_S = 60
CLIENT = "page"


class Answer(NamedTuple):
    """The device's answer; `reason` says why it refused or did not answer, and `by` who gave that reason."""

    accepted: bool
    reason: str | None = None
    by: Literal["device", "broker", "nobody"] = "device"


def run_suite(broker: Broker, device_id: str, suite: str, timeout_s: float = ANSWER_S) -> Answer:
    """Request a suite and return the device's answer, or an answer that reports a timeout."""
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
    except (ConnectionEnded, Unsendable) as error:
        return Answer(accepted=False, reason=str(error), by="broker")
    return Answer(accepted=False, reason=f"no answer within {timeout_s:g} s", by="nobody")


def _answer(body: bytes) -> Answer:
    try:
        response = msgspec.json.decode(body, type=Response)
        return Answer(response.accepted, results.printable(response.reason))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Answer(accepted=False, reason="unreadable answer")


class SuiteRequest(NamedTuple):
    """A request, its Unix time and its answer, which is None at first."""

    asked_s: float
    answer: Answer | None = None


class Progress(NamedTuple):
    """The outcome of a request in words, and whether the suite may now be requested."""

    words: str
    is_open: bool


def progress(
    request: SuiteRequest | None, suite: SuiteInfo, device: Device, ended: Sequence[Mark], now_s: float
) -> Progress:
    """Return the progress of the last request for a suite; `ended` are the ends of cases since the request."""
    words, is_done = ("", True) if request is None else _state(request, suite, device, ended, now_s)
    if device.state != "online":
        return Progress("; ".join(filter(None, [words, f"the device is {device.state}"])), is_open=False)
    return Progress(words, is_open=is_done)


def _state(
    request: SuiteRequest, suite: SuiteInfo, device: Device, ended: Sequence[Mark], now_s: float
) -> tuple[str, bool]:
    age_s, answer = now_s - request.asked_s, request.answer
    if answer is None or answer.by == "nobody":  # the device may still accept it
        return ("asked", False) if age_s < EXPIRY_S else (f"expired: no answer within {EXPIRY_S} s", True)
    if not answer.accepted:
        return short(f"{'not asked' if answer.by == 'broker' else 'refused'}: {answer.reason}"), True
    health = device.health
    if health.case_id in suite.cases:
        return "running", False
    done = {mark.detail for mark in ended}.intersection(suite.cases)
    is_busy = bool(health.case_id or health.cases_left or health.waiting_for)
    if done and (not is_busy or done.issuperset(suite.cases)):
        return "finished", True
    if is_busy or age_s <= EXPIRY_S:
        return short(f"queued: {health.waiting_for}" if health.waiting_for else "queued"), False
    return "ended", True

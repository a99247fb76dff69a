"""What became of each suite that a page has asked a device to run: nobody asks twice while that is open."""

from collections.abc import Sequence
from typing import NamedTuple

from benchd.daemon.delivery.messages import SuiteInfo
from benchd.dashboard.commands import EXPIRY_S, Answer
from benchd.dashboard.queries import Device, Mark
from benchd.dashboard.text import short


class SuiteRequest(NamedTuple):
    """A request at a Unix time, and its answer, None before there is one."""

    asked_s: float
    answer: Answer | None = None


class Progress(NamedTuple):
    """What became of a request, in words, and whether the suite may be asked for now."""

    words: str
    is_open: bool


def progress(
    request: SuiteRequest | None, suite: SuiteInfo, device: Device, ended: Sequence[Mark], now_s: float
) -> Progress:
    """Return the state of the last request for a suite; `ended` are the ends of cases since it was made."""
    words, is_done = ("", True) if request is None else _state(request, suite, device, ended, now_s)
    if device.state != "online":
        return Progress("; ".join(filter(None, [words, f"the device is {device.state}"])), is_open=False)
    return Progress(words, is_open=is_done)


def _state(
    request: SuiteRequest, suite: SuiteInfo, device: Device, ended: Sequence[Mark], now_s: float
) -> tuple[str, bool]:
    age_s, answer = now_s - request.asked_s, request.answer
    if answer is None or answer.by == "nobody":  # the device may still take it
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

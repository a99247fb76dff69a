"""Commands to the service over MQTT: each is accepted or refused, executed at the right time, and answered."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from benchd.daemon.delivery.commands import CancelParameters, Command, ReplayParameters, RunParameters
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.messages import Response
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.service import announcements, configuration
from benchd.daemon.service.state import State

MAX_WAITING = 100


def listen(state: State, link: Link) -> None:
    """Read the commands that have arrived, and answer refused ones immediately."""
    while link.state.commands:
        command = state.gate.take(link.state.commands.popleft(), _boottime_s(), time.time())
        if command and not command.refusal and len(state.commands) >= MAX_WAITING:
            state.gate.forget(command.id)
            command = replace(command, refusal=f"{MAX_WAITING} commands are already waiting")
        if command and command.refusal:
            log(f"command refused: {command.refusal}")
            answer = Response(id=command.id, verb=command.verb, accepted=False, reason=command.refusal)
            _answer(state, command, answer)
        elif command:
            state.commands.append(command)


def carry_out(state: State) -> None:
    """Execute waiting commands; while a case is timed, only one that ends it."""
    for command in list(state.commands):
        if not state.is_timed or command.verb == "cancel":
            state.commands.remove(command)
            answer = _obey(state, command)
            if not answer.accepted:
                state.gate.forget(answer.id)
            _answer(state, command, answer)


def _obey(state: State, command: Command) -> Response:
    answer = Response(id=command.id, verb=command.verb, accepted=True)
    if _boottime_s() >= command.expires_s:
        return msgspec.structs.replace(answer, accepted=False, reason="it expired while it waited")
    try:
        changes = _VERBS[command.verb](state, command.parameters)
    except BenchdError as error:
        return msgspec.structs.replace(answer, accepted=False, reason=str(error)[:500])
    if not state.is_timed:
        state.attempt_save()
    return msgspec.structs.replace(answer, **changes)


def _run(state: State, given: RunParameters) -> dict[str, Any]:
    suite = given.as_suite() if given.suite is None else state.agenda.named(given.suite)
    entry = state.agenda.begin(suite)
    return {"suite_id": entry.suite_id, "cases": entry.left}


def _cancel(state: State, given: CancelParameters) -> dict[str, Any]:
    if not state.agenda.cancel(given.suite_id):
        raise UsageError("no such run is in progress")
    return {}


def _reload(state: State, _: object) -> dict[str, Any]:
    configuration.checked(state.path, state.machine)
    state.reload_asked = True
    return {}


def _replay(state: State, given: ReplayParameters) -> dict[str, Any]:
    rows = state.link.delivery.replay(given.log, given.first, given.last) if state.link else None
    if rows is None:
        raise UsageError("this device has no such log; its health lists its logs")
    return {"rows": rows}


_VERBS: dict[str, Callable[[State, Any], dict[str, Any]]] = {
    "run": _run,
    "cancel": _cancel,
    "list": lambda state, _: {"suites": announcements.suites(state.agenda)},
    "reload": _reload,
    "status": lambda state, _: {"health": announcements.health(state)},
    "replay": _replay,
}


def _answer(state: State, to: Command, answer: Response) -> None:
    if state.link and to.answer_to:
        state.link.answer(to.answer_to, msgspec.json.encode(answer), to.correlation)


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)

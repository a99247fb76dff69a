"""Commands to the service over MQTT: each is accepted or refused, carried out at the right time, and answered."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from benchd.daemon.delivery import commands
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.messages import Health, Response
from benchd.daemon.delivery.outbox import STREAM, Outbox
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.service import announcements
from benchd.daemon.service.agenda import Agenda

COMMANDS = "commands"
MAX_WAITING = 100


class Remote:
    """Receives commands from `link`.

    `save` stores the changes of a command, and `reload`, which may raise BenchdError, requests a new configuration.
    """

    def __init__(
        self,
        link: Link | None,
        gate: commands.Gate,
        agenda: Agenda,
        outbox: Outbox,
        health: Callable[[], Health],
        save: Callable[[], None],
        reload: Callable[[], None],
    ) -> None:
        self._link, self.gate, self._agenda, self._outbox = link, gate, agenda, outbox
        self._health, self._save, self._reload = health, save, reload
        self._waiting: deque[commands.Command] = deque()
        self.gate.remember(outbox.kept_as(COMMANDS, commands.remembered_ids, []), _boottime_s())

    def remembered(self) -> bytes:
        """Return the ids to store, as `Gate.remembered`."""
        return self.gate.remembered(command.parameters.id for command in self._waiting)

    def listen(self) -> None:
        """Read the commands that arrived, and answer refused ones at once."""
        while self._link and self._link.seen.commands:
            found = self.gate.take(self._link.seen.commands.popleft(), _boottime_s(), time.time())
            if isinstance(found, commands.Command) and len(self._waiting) >= MAX_WAITING:
                self.gate.forget(found.parameters.id)
                reason = f"{MAX_WAITING} commands are already waiting"
                found = commands.Refused(found.parameters.id, found.verb, reason, found.answer_to, found.correlation)
            if isinstance(found, commands.Refused):
                log(f"command refused: {found.reason}")
                self._answer(found, Response(id=found.id, verb=found.verb, accepted=False, reason=found.reason))
            elif found:
                self._waiting.append(found)

    def carry_out(self, *, timed: bool) -> None:
        """Carry out waiting commands; while a case is timed, only one that ends it."""
        for command in list(self._waiting):
            if not timed or command.verb == "cancel":
                self._waiting.remove(command)
                answer = self._obey(command, timed=timed)
                if not answer.accepted:
                    self.gate.forget(answer.id)
                self._answer(command, answer)

    def _obey(self, command: commands.Command, *, timed: bool) -> Response:
        answer = Response(id=command.parameters.id, verb=command.verb, accepted=True)
        if _boottime_s() >= command.expires_s:
            return msgspec.structs.replace(answer, accepted=False, reason="it expired while it waited")
        try:
            changes = getattr(self, f"_do_{command.verb}")(command.parameters)
        except BenchdError as error:
            return msgspec.structs.replace(answer, accepted=False, reason=str(error)[:500])
        if not timed:
            self._save()
        return msgspec.structs.replace(answer, **changes)

    def _do_run(self, given: commands.RunParameters) -> dict[str, Any]:
        suite = given.as_suite() if given.suite is None else self._agenda.named(given.suite)
        entry = self._agenda.begin(suite)
        return {"suite_id": entry.suite_id, "cases": entry.left}

    def _do_cancel(self, given: commands.CancelParameters) -> dict[str, Any]:
        if not self._agenda.cancel(given.suite_id):
            raise UsageError("no such run is in progress")
        return {}

    def _do_list(self, given: commands.Parameters) -> dict[str, Any]:
        return {"suites": announcements.suites(self._agenda)}

    def _do_reload(self, given: commands.Parameters) -> dict[str, Any]:
        self._reload()
        return {}

    def _do_status(self, given: commands.Parameters) -> dict[str, Any]:
        return {"health": self._health()}

    def _do_replay(self, given: commands.ReplayParameters) -> dict[str, Any]:
        if given.stream is not None and given.stream.encode() != self._outbox.kept(STREAM):
            raise UsageError("these numbers are of another outbox of this device")
        rows = self._outbox.send_again(given.since_seq, given.until_seq)
        if self._link:
            self._link.replay()
        return {"rows": rows}

    def _answer(self, to: commands.Command | commands.Refused, answer: Response) -> None:
        if self._link and to.answer_to:
            self._link.answer(to.answer_to, msgspec.json.encode(answer), to.correlation)


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)

"""Handles the consequences of a record: it is appended to the log, which the link sends, and then changes the facts."""

import time
import uuid
from dataclasses import replace

from benchd.daemon import records
from benchd.daemon.delivery.messages import latest
from benchd.daemon.errors import SchemaError
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.measuring import recording
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.protocol import StageName, unmeasured
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Sink
from benchd.daemon.records import Record
from benchd.daemon.service import regressions
from benchd.daemon.service.facts import Running, Standing
from benchd.daemon.service.state import State

TIMED: tuple[StageName, ...] = ("warm_up", "measure")
DIED = "the service died while this case ran"


class ResultSink(Sink):
    """The session's sink: holds the link back while a case is timed, and receives its record."""

    def __init__(self, state: State) -> None:
        self._state = state

    def stage(self, planned: PlannedCase, process: int, stage: StageName, done: str = "") -> None:
        """Hold the link while the case warms up and is timed."""
        self._state.hold(timed=stage in TIMED)

    def publish(self, record: Record, body: bytes) -> None:
        """Append the record to the log, then process its consequences."""
        self._state.hold(timed=False)
        self._state.owed.append((record, body))
        settle(self._state)


def settle(state: State) -> None:
    """Append unsaved records, in order; raise the log's errors if the disk is still full."""
    while state.owed:
        record, body = state.owed[0]
        seq = state.records.append(body)
        del state.owed[0]
        take_in(state, record, seq)


def take_in(state: State, record: Record, seq: int) -> None:
    """Process the consequences of a record in the log, and store them with its number.

    Cases listed in a command do not count as results of the plan.
    """
    is_planned, judgement = record.case_id in state.agenda.planned, None
    if is_planned and state.agenda.is_of_suite(record.suite_id):
        judgement = regressions.take_in(state, record)
    in_s = regressions.again_in_s(state.facts.standings.get(record.case_id, Standing()), record)
    now_s = time.monotonic()
    spent_s, state.since_s = now_s - (state.since_s or now_s), now_s
    state.agenda.finish(record, spent_s, None if in_s is None else state.agenda.time_s(time.time()) + in_s)
    state.facts.running = None
    state.facts.applied_seq = seq
    state.attempt_save()
    if is_planned:
        state.retain(state.topics.latest(record.case_id), latest(record, judgement))


def recover(state: State) -> None:
    """Process records that are newer than the facts, and end the case during which the last service died, if any."""
    facts, source, running = state.facts, state.records, state.facts.running
    if facts.log != source.id:  # a different log, or no facts: the log's content no longer has consequences
        facts.log, facts.applied_seq = source.id, source.last_seq
    for seq, body in source.entries(facts.applied_seq):
        try:
            record = records.decode(body)
        except SchemaError as error:
            log(f"{source.path}, seq {seq}: {error}")
            continue
        running = None if running and _is_of(record, running) else running
        if record.reason == DIED:
            state.agenda.skip(record.suite_id, record.case_id)
        take_in(state, record, seq)
    if running:
        _end_interrupted(state, running)


def _is_of(record: Record, running: Running) -> bool:
    """Return whether this record belongs to the running case, not to an earlier run of the same case."""
    same = (record.suite_id, record.case_id, record.boot_id)
    is_later = record.t_mono_ns >= running.t_mono_ns
    return same == (running.suite_id, running.case.case_id, running.boot_id) and is_later


def _end_interrupted(state: State, running: Running) -> None:
    """Publish the case during which the last service died as aborted, and skip it in this run.

    The case is skipped because it may have killed the service.
    """
    run_id = RunId(uuid.uuid4().hex, running.t_wall, running.t_mono_ns)
    run = replace(state.session.run(running.suite_id), boot_id=running.boot_id, flags=())
    record = recording.record(running.case, running.preset, run, run_id, [unmeasured("aborted", DIED)])
    state.agenda.skip(record.suite_id, record.case_id)
    state.session.publish(record)

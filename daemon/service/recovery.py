"""After a start: what only the journal has, because the outbox is new or the last service died between the two."""

from functools import partial

from benchd.daemon.delivery import refill
from benchd.daemon.delivery.outbox import JOURNALLED
from benchd.daemon.records import Record
from benchd.daemon.service.between import Between
from benchd.daemon.service.cases import Cases
from benchd.daemon.service.parts import Base, Configured
from benchd.daemon.service.publisher import Running
from benchd.daemon.verdicts.results import JOURNAL

NO_RUN = "0" * 32
"""The mark of a journal that was read while it was empty: all of its records come after it."""


def recover(base: Base, now: Configured, between: Between, cases: Cases, running: Running | None) -> None:
    """Give the outbox what only the journal has, and end the case in which the last service died, if any."""
    mark = base.outbox.kept(JOURNALLED)
    if mark == b"":
        between.attempt(lambda: _refill(base, now, between))
    for record, message in refill.after(base.places.state / JOURNAL, mark or b"") if mark or running else []:
        if running and _is_of(record, running):
            between.attempt(partial(cases.take_up, record, message.body))
            running = None
        elif mark:
            between.attempt(partial(now.publisher.adopt, [message], record.run_id))
    if running:
        cases.end_interrupted(running)


def _is_of(record: Record, running: Running) -> bool:
    """Return whether the running case had come to this record; an earlier one may be of the same case."""
    same = (record.suite_id, record.case_id, record.boot_id)
    is_later = record.t_mono_ns >= running.t_mono_ns
    return same == (running.suite_id, running.case.case_id, running.boot_id) and is_later


def _refill(base: Base, now: Configured, between: Between) -> None:
    """Fill a new or salvaged outbox from the journals and say so in an event; raise UsageError if that fails."""
    if not now.publisher.link:
        return
    added, last, unreadable = base.reserve.write(lambda: refill.refill(base.outbox, refill.journals(base.places.state)))
    now.publisher.adopt([], last or NO_RUN)
    if added or unreadable:
        lines = f", without {len(unreadable)} lines that are not records" if unreadable else ""
        between.event("outbox_refilled", f"the outbox lacked {added} results of {JOURNAL}; they are sent{lines}")

"""Verifies the folders of `[[shipped]]` when due, publishes the verdicts, and finds faster variants."""

import errno
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from benchd.daemon import records
from benchd.daemon.config import ShippedFolder
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.messages import DeployedFolder
from benchd.daemon.errors import BenchdError, NotAvailable, SchemaError
from benchd.daemon.machine import folders
from benchd.daemon.machine.lock import Busy
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import NOT_RUN
from benchd.daemon.records import Record, wall_now
from benchd.daemon.sampling.child import NotStarted
from benchd.daemon.service.facts import Verification
from benchd.daemon.service.state import State
from benchd.daemon.shipping import manifest, race, verifying
from benchd.daemon.shipping.manifest import MANIFEST, Manifest
from benchd.daemon.shipping.promise import VerificationResult
from benchd.daemon.trigger import DAY_S
from benchd.daemon.verdicts import recommend
from benchd.daemon.verdicts.recommend import Requirements

SHIPPED = "shipped"
FINGERPRINT_S = 3600.0  # interval between checks whether the machine or its software has changed
RETRY_S = 60.0  # while another process measures, or the machine lacks resources for measuring
LACKS = errno.EAGAIN, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EROFS
REASON_CHARACTERS = 500
NEWEST = 5000  # number of newest results used to find a faster variant


def fingerprint_of(shipped: ShippedFolder, machine: str) -> str:
    """Return a hash of everything that a verdict depends on: machine, software, trust settings and the folder's files.

    Files are compared by size and time, which also change during a copy, and by whether the service may read them. They
    are listed only if there is a manifest.
    """
    folder = Path(shipped.path)
    parts: list[object] = [machine, shipped.path, shipped.trust_code, shipped.trust_plan]
    with suppress(OSError):  # not readable, or already deleted
        files = folders.listed(folder) if (folder / MANIFEST).is_file() else []
        parts += [(*file, os.access(file[0], os.R_OK)) for file in files]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def is_due(shipped: ShippedFolder, before: Verification | None, now_s: float, fingerprint: str) -> bool:
    """Return whether a folder must be verified: because it never was, is due, or the folder or machine has changed."""
    if before is None or before.fingerprint != fingerprint or before.verified_s > now_s + DAY_S:
        return True
    trigger = shipped.trigger()
    next_s = trigger.next_after(before.verified_s) if trigger else None
    return next_s is not None and next_s <= now_s


def document(
    folder: ShippedFolder,
    shipped: Manifest | None,
    verdict: VerificationResult | str,
    before: Verification | None,
    better: str,
) -> DeployedFolder:
    """Return the message about a verification, or about the reason that prevented it."""
    measured = None if isinstance(verdict, str) else verdict
    answer, reason = (measured.answer, measured.reason or measured.rebuilt) if measured else ("broken", str(verdict))
    was, now_wall = before.published if before else None, wall_now()
    promised = shipped.promised if shipped else None
    return DeployedFolder(
        name=folder.called,
        case_id=shipped.case.case_id if shipped else (was.case_id if was else ""),
        verdict=answer,
        reason=reason.replace(folder.path, folder.called)[:REASON_CHARACTERS],
        since=was.since if was and was.verdict == answer else now_wall,
        t_wall=now_wall,
        promised_ms=promised.latency_ms if promised else None,
        promised_low_ms=promised.low_ms if promised else None,
        promised_high_ms=promised.high_ms if promised else None,
        now_ms=measured.now_ms if measured else None,
        change=measured.change if measured else None,
        change_low=measured.change_low if measured else None,
        change_high=measured.change_high if measured else None,
        better=better,
    )


def better(shipped: Manifest, records: Iterable[Record]) -> str | None:
    """Return which variant, in the plan's results, is faster than the shipped one, beyond its interval; empty if none.

    Returns None without results for the shipped variant. A result only counts if its weights, device and power mode are
    those of the promise, its case differs only in the variant, and the variant meets the requested limits.
    """
    limits = {name: value for name, value in shipped.asked.items() if name in Requirements.__struct_fields__}
    alike = [record for record in records if _is_alike(record, shipped)]
    if not any(record.case.variant == shipped.case.variant for record in alike):
        return None
    for decision in recommend.decide(alike, Requirements(**limits)):  # type: ignore[arg-type]
        variants = {run.case.variant: run for run in decision.candidates.values()}
        mine = variants.get(shipped.case.variant)
        ahead = decision.candidates.get(decision.ship or "")
        if mine is None or ahead is None or ahead is mine:
            continue
        lead = recommend.lead(ahead, mine, decision.objective)
        if lead and lead.low > 1.0:
            return f"{decision.ship}, {lead.point:.3g}x [{lead.low:.3g}, {lead.high:.3g}]"
    return ""


def _is_alike(record: Record, shipped: Manifest) -> bool:
    mine, current, original = shipped.case, record.environment, shipped.environment
    case = msgspec.structs.replace(record.case, variant=mine.variant, provider=mine.provider, dla=mine.dla)
    weights = record.model.weights_sha256 if record.model else ""
    is_there = (current.device, current.power_mode) == (original.device, original.power_mode)
    return is_there and weights == shipped.weights_sha256 and case == mine


def next_due(state: State) -> ShippedFolder | None:
    """Return the folder to verify now, or None if there is none."""
    if not state.settings.shipped or time.monotonic() < state.verify_from_s:
        return None
    if not state.environment or state.every.is_due(SHIPPED, FINGERPRINT_S):
        state.environment = state.machine.environment().fingerprint
    now_s, verified = time.time(), state.facts.shipped
    for folder in state.settings.shipped:
        if is_due(folder, verified.get(folder.called), now_s, fingerprint_of(folder, state.environment)):
            return folder
    return None


def forget_unconfigured(state: State) -> None:
    """Drop the state of folders that are no longer configured."""
    configured = {folder.called for folder in state.settings.shipped}
    state.facts.shipped = {name: known for name, known in state.facts.shipped.items() if name in configured}


def verify(state: State, folder: ShippedFolder) -> None:
    """Verify a folder and publish the verdict; if the machine cannot measure now, retry later."""
    verdict: VerificationResult | str
    session, path = state.session, Path(folder.path)
    shipped, fingerprint = None, fingerprint_of(folder, state.environment)
    try:
        shipped = manifest.read(path, partial(_attend, session))
        verifying.refuse_untrusted(path, shipped, trust_code=folder.trust_code)
        limits = plan.limited(race.LIMITS, state.settings.limits)
        with _on_its_device(session, shipped):
            verdict = verifying.verify(path, shipped, session, limits, trust_plan=folder.trust_plan)
            if verdict.answer == "failed" and verdict.reason.startswith(NOT_RUN):
                _wait(state, verdict.reason)
                return
    except (BenchdError, OSError) as error:
        if _is_for_now(error):
            _wait(state, str(error))
            return
        verdict = str(error)
        if isinstance(error, OSError):  # the service is not allowed to read a file
            verdict = f"{error.filename or path}: {error.strerror}"
    finally:
        state.hold(timed=False)
    if not session.interrupted:
        before = state.facts.shipped.get(folder.called)
        ahead = better(shipped, _results(state.records)) if shipped else ""
        if ahead is None:  # the journal has been moved away: keep the earlier answer about the same folder
            ahead = before.published.better if before and before.fingerprint == fingerprint else ""
        publish(state, folder, document(folder, shipped, verdict, before, ahead), fingerprint)


def _wait(state: State, reason: str) -> None:
    log(f"waiting: {reason}")
    state.verify_from_s = time.monotonic() + RETRY_S


def publish(state: State, folder: ShippedFolder, now: DeployedFolder, fingerprint: str) -> None:
    """Store and retain a verdict; announce a newly broken or again kept promise, and a new faster variant."""
    before = state.facts.shipped.get(folder.called)
    was_broken = before is not None and before.is_broken
    was_better = before.published.better if before else ""
    is_kept, is_same = now.verdict in ("kept", "faster"), before is not None and before.fingerprint == fingerprint
    is_broken = now.is_broken or (was_broken and is_same and not is_kept)
    state.facts.shipped[folder.called] = Verification(time.time(), fingerprint, now, is_broken)
    state.attempt_save()
    state.retain(state.topics.shipped(folder.called), now)
    variant, was_variant = (text.partition(",")[0] for text in (now.better, was_better))
    if is_broken != was_broken and (is_broken or is_kept):
        name = "promise_broken" if is_broken else "promise_kept"
        state.event(name, f"{now.name}: {now.verdict}: {now.told}")
    # only a new variant is announced, because the size of the lead changes with each run
    if variant and variant != was_variant:
        state.event("shipped_behind", f"{now.name}: better: {now.better}")


def _results(source: Log) -> Iterator[Record]:
    """Yield the newest results, except those from a different version."""
    for entry in source.entries(source.last_seq - NEWEST):
        with suppress(SchemaError):
            yield records.decode(entry.body)


def _attend(session: Session) -> None:
    """Let the service process events while it reads a folder; raise NotAvailable if it must end."""
    if reason := session.reason_to_end():
        raise NotAvailable(reason)


@contextmanager
def _on_its_device(session: Session, shipped: Manifest) -> Iterator[None]:
    """Make the session ignore the GPU during a `with` block if the folder's promise is for the CPU."""
    machine = session.machine
    try:
        if shipped.environment.device == "cpu" and machine.device != "cpu":
            session.rest()
            session.machine = plan.inspect("cpu")
        yield
    finally:
        session.rest()
        session.machine = machine


def _is_for_now(error: Exception) -> bool:
    """Return whether the error only means that the machine cannot measure now, not that the folder is invalid."""
    cause = error.__cause__ or error
    return isinstance(error, Busy | NotStarted) or (isinstance(cause, OSError) and cause.errno in LACKS)

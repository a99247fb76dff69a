"""The folders of `[[shipped]]`: when each is verified, what is published of it, and which variant is ahead."""

import errno
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from benchd.daemon.config import Shipped
from benchd.daemon.delivery import refill
from benchd.daemon.delivery.link import Link
from benchd.daemon.delivery.messages import Deployed
from benchd.daemon.errors import BenchdError, NotAvailable, UsageError
from benchd.daemon.machine import folders
from benchd.daemon.machine.lock import Busy
from benchd.daemon.machine.systemd_notify import log
from benchd.daemon.measuring import plan, race, verifying
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import NOT_RUN
from benchd.daemon.records import Record, wall_now
from benchd.daemon.sampling.child import NotStarted
from benchd.daemon.service.between import Between
from benchd.daemon.service.parts import Base, Configured
from benchd.daemon.trigger import DAY_S
from benchd.daemon.verdicts import manifest, recommend
from benchd.daemon.verdicts.manifest import MANIFEST, Manifest
from benchd.daemon.verdicts.promise import Verified
from benchd.daemon.verdicts.recommend import Requirements

SHIPPED = "shipped"
NAMES = "shipped_names"
FINGERPRINT_S = 3600.0  # between two looks at whether the machine or its software has changed
RETRY_S = 60.0  # while another process measures, or the machine lacks what measuring takes
LACKS = errno.EAGAIN, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EROFS
REASON_CHARACTERS = 500


class Kept(Struct, frozen=True):
    """What is kept of a folder: when it was verified, what was published, and the `fingerprint` of what that is of.

    Once broken, its promise `is_broken` until a verdict says that it is kept again, or is of something else.
    """

    verified_s: float
    fingerprint: str
    said: Deployed
    is_broken: bool = False


Standings = Mapping[str, Kept]
"""By the name of the folder."""


def fingerprint_of(one: Shipped, machine: str) -> str:
    """Return the hash of what a verdict is of: the machine with its software, what is trusted, and the folder's files.

    Files go by size and time, which a copy that is still under way changes too, and by whether the service may read
    them. They are listed only beside a manifest.
    """
    folder = Path(one.path)
    found: list[object] = [machine, one.path, one.trust_code, one.trust_plan]
    with suppress(OSError):  # it may not be read, or a file is gone by now
        files = folders.listed(folder) if (folder / MANIFEST).is_file() else []
        found += [(*file, os.access(file[0], os.R_OK)) for file in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()


decode = msgspec.json.Decoder(dict[str, Kept]).decode
"""Reads what an earlier service has kept."""


def is_due(one: Shipped, before: Kept | None, now_s: float, fingerprint: str) -> bool:
    """Return whether a folder is to be verified: never yet, its time has come, or it or its machine has changed."""
    if before is None or before.fingerprint != fingerprint or before.verified_s > now_s + DAY_S:
        return True
    trigger = one.trigger()
    next_s = trigger.next_after(before.verified_s) if trigger else None
    return next_s is not None and next_s <= now_s


def said(one: Shipped, shipped: Manifest | None, found: Verified | str, before: Kept | None, better: str) -> Deployed:
    """Return what to publish of a verification, or of the reason that prevented it."""
    answer = "broken" if isinstance(found, str) else found.answer
    reason = found if isinstance(found, str) else found.reason or found.rebuilt
    was = before.said if before else None
    now_wall = wall_now()
    promised = shipped.promised if shipped else None
    return Deployed(
        name=one.called,
        case_id=shipped.case.case_id if shipped else (was.case_id if was else ""),
        verdict=answer,
        reason=reason.replace(one.path, one.called)[:REASON_CHARACTERS],
        since=was.since if was and was.verdict == answer else now_wall,
        t_wall=now_wall,
        promised_ms=promised.latency_ms if promised else None,
        promised_low_ms=promised.low_ms if promised else None,
        promised_high_ms=promised.high_ms if promised else None,
        now_ms=None if isinstance(found, str) else found.now_ms,
        change=None if isinstance(found, str) else found.change,
        change_low=None if isinstance(found, str) else found.change_low,
        change_high=None if isinstance(found, str) else found.change_high,
        better=better,
    )


def better(shipped: Manifest, records: Iterable[Record]) -> str | None:
    """Return which variant the plan's results show ahead of the shipped one beyond its interval; empty if none does.

    None if they do not have the shipped one. Only results of the same weights count, of a case that differs in nothing
    else, on the device and in the power mode of the promise, and only variants that meet the limits asked for.
    """
    limits = {name: value for name, value in shipped.asked.items() if name in Requirements.__struct_fields__}
    alike = [record for record in records if _is_alike(record, shipped)]
    if not any(record.case.variant == shipped.case.variant for record in alike):
        return None
    for decision in recommend.decide(alike, Requirements(**limits)):  # type: ignore[arg-type]
        mine = next((one for one in decision.candidates.values() if one.case.variant == shipped.case.variant), None)
        ahead = decision.candidates.get(decision.ship or "")
        if mine is None or ahead is None or ahead is mine:
            continue
        lead = recommend.lead(ahead, mine, decision.objective)
        if lead and lead.low > 1.0:
            return f"{decision.ship}, {lead.point:.3g}x [{lead.low:.3g}, {lead.high:.3g}]"
    return ""


def _is_alike(record: Record, shipped: Manifest) -> bool:
    mine, here, there = shipped.case, record.environment, shipped.environment
    case = msgspec.structs.replace(record.case, variant=mine.variant, provider=mine.provider, dla=mine.dla)
    weights = record.model.weights_sha256 if record.model else ""
    is_there = (here.device, here.power_mode) == (there.device, there.power_mode)
    return is_there and weights == shipped.weights_sha256 and case == mine


class Deployments:
    """Verifies the configured folders one at a time; `standings` is what is known of each."""

    def __init__(self, base: Base, now: Configured, between: Between, standings: Standings) -> None:
        self._base, self._now, self._between = base, now, between
        self.configured = now.settings.shipped
        self.standings = {name: one for name, one in standings.items() if name in {s.called for s in self.configured}}
        self._fingerprint = ""
        self._busy_until_s = 0.0

    def introduce(self, link: Link) -> None:
        """Retain what is known of each folder."""
        for name, kept in self.standings.items():
            link.retain(self._now.topics.shipped(name), msgspec.json.encode(kept.said))

    def next(self) -> Shipped | None:
        """Return the folder to verify now, None if there is none."""
        if not self.configured or time.monotonic() < self._busy_until_s:
            return None
        if not self._fingerprint or self._base.every.is_due(SHIPPED, FINGERPRINT_S):
            self._fingerprint = self._now.machine.environment().fingerprint
        known = ((one, self.standings.get(one.called)) for one in self.configured)
        now_s, of = time.time(), self._fingerprint
        return next((one for one, kept in known if is_due(one, kept, now_s, fingerprint_of(one, of))), None)

    def verify(self, one: Shipped, session: Session) -> None:
        """Verify a folder and publish what that found; a machine that cannot measure now delays it."""
        found: Verified | str
        shipped, of = None, fingerprint_of(one, self._fingerprint)
        try:
            shipped = manifest.read(Path(one.path), partial(_attend, session))
            verifying.refuse_untrusted(Path(one.path), shipped, trust_code=one.trust_code)
            limits = plan.limited(race.LIMITS, self._now.settings.limits)
            with _on_its_device(session, shipped):
                found = verifying.verify(Path(one.path), shipped, session, limits, trust_plan=one.trust_plan)
                if found.answer == "failed" and found.reason.startswith(NOT_RUN):
                    self._wait(found.reason)
                    return
        except (BenchdError, OSError) as error:
            if _is_for_now(error):
                self._wait(str(error))
                return
            found = str(error)
            if isinstance(error, OSError):  # a file that the service may not read
                found = f"{error.filename or one.path}: {error.strerror}"
        finally:
            self._now.publisher.end()
        if not session.interrupted:
            before = self.standings.get(one.called)
            ahead = better(shipped, self._results()) if shipped else ""
            if ahead is None:  # the journal was moved away since: what it said of the same folder stands
                ahead = before.said.better if before and before.fingerprint == of else ""
            self._publish(one, said(one, shipped, found, before, ahead), of)

    def _wait(self, reason: str) -> None:
        log(f"waiting: {reason}")
        self._busy_until_s = time.monotonic() + RETRY_S

    def _results(self) -> Iterator[Record]:
        """Yield the plan's results, without the lines that a power cut has torn; none if they cannot be read.

        Those of the journal that was put away last come first: the new one may not have every case yet.
        """
        try:
            for path in refill.journals(self._base.places.state)[-2:]:
                for record, _ in refill.results(path, []):
                    yield record
        except UsageError as error:
            log(f"no other variant is looked for: {error}")

    def _publish(self, one: Shipped, now: Deployed, of: str) -> None:
        before = self.standings.get(one.called)
        was_broken = before is not None and (before.is_broken or before.said.is_broken)
        was_better = before.said.better if before else ""
        is_kept, is_same = now.verdict in ("kept", "faster"), before is not None and before.fingerprint == of
        is_broken = now.is_broken or (was_broken and is_same and not is_kept)
        self.standings = {**self.standings, one.called: Kept(time.time(), of, now, is_broken)}
        self._between.attempt(lambda: self._now.publisher.keep({SHIPPED: msgspec.json.encode(self.standings)}))
        if self._now.publisher.link:
            self._now.publisher.link.retain(self._now.topics.shipped(one.called), msgspec.json.encode(now))
        variant, was_variant = (text.partition(",")[0] for text in (now.better, was_better))
        if is_broken != was_broken and (is_broken or is_kept):
            name = "promise_broken" if is_broken else "promise_kept"
            self._between.event(name, f"{now.name}: {now.verdict}: {now.told}")
        if variant and variant != was_variant:  # its lead is another one after each run
            self._between.event("shipped_behind", f"{now.name}: better: {now.better}")


def _attend(session: Session) -> None:
    """Let the service attend while it reads a folder; raise NotAvailable if it must end."""
    if reason := session.reason_to_end():
        raise NotAvailable(reason)


@contextmanager
def _on_its_device(session: Session, shipped: Manifest) -> Iterator[None]:
    """Let the session leave the GPU out over a `with` block if the folder's promise is of the CPU."""
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
    """Return whether the machine cannot measure now, which says nothing about the folder."""
    cause = error.__cause__ or error
    return isinstance(error, Busy | NotStarted) or (isinstance(cause, OSError) and cause.errno in LACKS)

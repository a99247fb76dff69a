"""`benchd verify`: measures the files of a shipped folder, after their golden answers, against what was promised."""

from pathlib import Path

import msgspec

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.measuring import plan, race, recording
from benchd.daemon.measuring.plan import Machine, Planned
from benchd.daemon.measuring.protocol import Limits, Outcome
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.measuring.user_model import UserFile, UserModel, UserModule
from benchd.daemon.records import wall_now
from benchd.daemon.verdicts import manifest, promise
from benchd.daemon.verdicts.manifest import CODE, ONNX, WEIGHTS, Manifest
from benchd.daemon.verdicts.promise import Verified

PROCESSES = 5
NOT_GOLDEN = "its answers are not the golden ones"
"""The beginning of the reason of a process whose golden answers differ."""


def refuse_untrusted(folder: Path, shipped: Manifest, *, trust_plan: bool, trust_code: bool) -> None:
    """Raise UsageError for a folder that runs code when it is loaded, unless this machine made it or it is trusted."""
    trusted = {"plan": trust_plan, "code": trust_code, None: True}[shipped.runs]
    if trusted or manifest.is_ours(folder):
        return
    what = "a TensorRT plan" if shipped.runs == "plan" else f"Python code ({CODE}/)"
    raise UsageError(
        f"{folder}: loading it runs {what}, which this machine did not make; if you know who did, give "
        f"--trust-{shipped.runs}"
    )


def planned(folder: Path, shipped: Manifest, limits: Limits, machine: Machine) -> Planned:
    """Return the case of a folder's files; raise NotAvailable if it cannot run here, UsageError for a changed file."""
    case, own = shipped.case, _own(folder, shipped)
    if own:
        case = msgspec.structs.replace(case, model=own.model, options={})
    reason = plan.why_not(case, machine, user_onnx=isinstance(own, UserFile))
    if reason:
        raise NotAvailable(f"{folder}: {case.variant.label} cannot run here: {reason}")
    weights = None if isinstance(own, UserFile) else str((folder / WEIGHTS).resolve())
    return Planned(case, race.PRESET, limits, True, None, own, weights=weights, deployed=str(folder.resolve()))


def _own(folder: Path, shipped: Manifest) -> UserModel | None:
    """Return the folder's own file or module; None for a module of the catalog."""
    if shipped.provider:
        return UserFile.at((folder / ONNX).resolve(), [str(spec) for spec in shipped.read])
    if shipped.runs == "code":
        return UserModule(shipped.entry, list(shipped.read), str((folder / CODE).resolve()))
    return None


def verify(folder: Path, shipped: Manifest, session: Session, limits: Limits, processes: int = PROCESSES) -> Verified:
    """Measure the folder in fresh processes until one fails; return the verdict, which is broken for other answers."""
    try:
        entry = planned(folder, shipped, limits, session.machine)
    except UsageError as error:
        return _unreadable(shipped, str(error))
    supervisor = Supervisor(session, [entry])
    outcomes: list[Outcome] = []
    with session.measuring():
        run, run_id = session.run(supervisor.suite_id), RunId.new()
        while len(outcomes) < processes and all(one.process.status == "ok" for one in outcomes):
            name = f"verify.{shipped.name.replace(':', '_')}.{len(outcomes)}"
            outcomes.append(supervisor.process(entry, name, len(outcomes), is_compared=True))
    record = recording.record(entry.case, entry.preset, run, run_id, outcomes, limits=limits)
    is_golden = not (record.reason or "").startswith(NOT_GOLDEN)
    return promise.judge(shipped, record, is_golden=is_golden)


def _unreadable(shipped: Manifest, reason: str) -> Verified:
    return Verified(
        name=shipped.name,
        case_id=shipped.case.case_id,
        answer="broken",
        reason=f"{NOT_GOLDEN}: {reason}",
        promised_ms=shipped.promised.latency_ms,
        t_wall=wall_now(),
        fingerprint="",
    )

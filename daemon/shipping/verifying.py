"""`benchd verify`: checks a shipped folder's golden answers, then compares its measurements with the promise."""

from contextlib import closing
from pathlib import Path

import msgspec

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine import folders
from benchd.daemon.measuring import plan, recording, user_model
from benchd.daemon.measuring.plan import Machine, PlannedCase
from benchd.daemon.measuring.protocol import Limits, Outcome, Verify
from benchd.daemon.measuring.recording import RunId
from benchd.daemon.measuring.session import Session
from benchd.daemon.measuring.supervisor import Supervisor, Turn
from benchd.daemon.records import Environment, Inputs, InputSpec, UserFile, UserModel, UserModule, wall_now
from benchd.daemon.shipping import manifest, promise, race
from benchd.daemon.shipping.manifest import CODE, INPUTS, MANIFEST, NOT_GOLDEN, ONNX, PLAN, WEIGHTS, Manifest
from benchd.daemon.shipping.promise import VerificationResult
from benchd.daemon.verdicts import doubts, results
from benchd.models import catalog

PROCESSES = 5


def refuse_untrusted(folder: Path, shipped: Manifest, *, trust_code: bool) -> None:
    """Raise UsageError for a folder that runs code when loaded, unless this user made or trusts it."""
    if shipped.runs_code and not trust_code and not manifest.is_ours(folder):
        raise UsageError(
            f"{folder}: loading it runs Python code ({CODE}/), which this user ({folders.user()}) did not ship; if you "
            "know who did, give --trust-code, or for the service set trust_code = true in [[shipped]]"
        )


def why_rebuilt(folder: Path, shipped: Manifest, here: Environment, *, trust_plan: bool) -> str:
    """Return why the TensorRT plan or AOTInductor package must be rebuilt instead of loaded, or an empty string.

    The worker compares the environment with the one that a package was compiled for.
    """
    if not shipped.program:
        return ""
    if not (trust_plan or manifest.is_ours(folder)):
        return (
            f"this user ({folders.user()}) did not make {shipped.program}, which is a program: --trust-plan loads it, "
            "or for the service trust_plan = true in [[shipped]]"
        )
    if shipped.program != PLAN:
        return ""
    was = shipped.environment
    parts = [
        ("GPU", _gpu(was), _gpu(here)),
        ("driver", was.driver, here.driver),
        ("TensorRT", was.versions.get("tensorrt"), here.versions.get("tensorrt")),
    ]
    return "; ".join(f"{PLAN} was built for {part} {before}, not {now}" for part, before, now in parts if before != now)


def _gpu(environment: Environment) -> str | None:
    """Return what identifies the GPU; on a Jetson the board, because a worker and /proc name its GPU differently."""
    return environment.board or environment.soc if environment.is_tegra else environment.gpu


def planned(folder: Path, shipped: Manifest, limits: Limits, machine: Machine) -> PlannedCase:
    """Return the case of a folder's files; raise NotAvailable if it cannot run here, UsageError for a changed file."""
    case, own = shipped.case, _own(folder, shipped)
    if own:
        case = msgspec.structs.replace(case, model=own.model, options={})
    elif catalog.find(case.model) is None:
        raise NotAvailable(f"{folder}: this benchd has no model {case.model[:80]!r}")
    reason = plan.why_not(case, machine, user_onnx=isinstance(own, UserFile))
    if reason:
        raise NotAvailable(f"{folder}: {case.variant.label} cannot run here: {reason}")
    weights = None if isinstance(own, UserFile) else str((folder / WEIGHTS).resolve())
    stored = (folder / INPUTS / "0.npy").resolve()
    samples = str(stored) if own is None and stored.is_file() else None
    return PlannedCase(case, race.PRESET, limits, True, None, own, Inputs(weights=weights, samples=samples))


def _own(folder: Path, shipped: Manifest) -> UserModel | None:
    """Return the folder's own file or module, or None for a catalog model."""
    if shipped.provider:
        return user_model.onnx_file((folder / ONNX).resolve(), [str(spec) for spec in _read(folder, shipped)])
    if shipped.runs_code:
        return UserModule(shipped.entry, _read(folder, shipped), str((folder / CODE).resolve()))
    return None


def _read(folder: Path, shipped: Manifest) -> list[InputSpec]:
    """Return the inputs of the folder's own model; raise UsageError for a file that the folder does not contain."""
    listed = {resource.name for resource in shipped.resources}
    if other := next((spec.file for spec in shipped.read if spec.file and spec.file not in listed), None):
        raise UsageError(f"{folder}: its {MANIFEST} reads {other[:80]!r}, which is not in the folder; ship it again")
    return [
        msgspec.structs.replace(spec, file=str((folder / spec.file).resolve())) if spec.file else spec
        for spec in shipped.read
    ]


def verify(
    folder: Path,
    shipped: Manifest,
    session: Session,
    limits: Limits,
    processes: int = PROCESSES,
    *,
    trust_plan: bool = False,
) -> VerificationResult:
    """Measure the folder in fresh processes until one fails; return the verdict, `broken` for different answers.

    The session's `attend` is called after each step that may take seconds, because the service has a watchdog.
    """
    environment = session.machine.environment()
    session.reason_to_end()
    rebuilt = why_rebuilt(folder, shipped, environment, trust_plan=trust_plan)
    try:
        entry = planned(folder, shipped, limits, session.machine)
    except UsageError as error:
        return _unreadable(shipped, str(error))
    session.reason_to_end()
    engine = str((folder / shipped.program).resolve()) if shipped.program and not rebuilt else ""
    supervisor = Supervisor(session, [entry])
    outcomes: list[Outcome] = []
    with session.measuring():
        run, run_id = session.run(supervisor.suite_id), RunId.new()
        session.sampler(supervisor.plan)
        session.reason_to_end()

        def turn(number: int) -> Turn:
            recipe = Verify(folder=str(folder.resolve()), engine=engine, repeats=number == 0, layers=True)
            return Turn(entry, f"{run_id.run_id}.{number}", number, recipe)

        with closing(supervisor.in_turn(range(processes), turn)) as running:
            for _, outcome in running:
                outcomes.append(outcome)
                if outcome.process.status != "ok":
                    break
    record = recording.of_planned(entry, run, run_id, outcomes)
    is_golden = not (record.reason or "").startswith(NOT_GOLDEN)
    promised = results.read(folder)[-1]
    return promise.judge(
        shipped,
        record,
        is_golden=is_golden,
        rebuilt=rebuilt,
        confirmed=promised.processes,
        promise_flags=doubts.of(promised),
    )


def _unreadable(shipped: Manifest, reason: str) -> VerificationResult:
    return VerificationResult(
        name=shipped.name,
        case_id=shipped.case.case_id,
        answer="broken",
        reason=f"{NOT_GOLDEN}: {reason}",
        promised_ms=shipped.promised.latency_ms,
        t_wall=wall_now(),
        fingerprint="",
    )

"""Turns the winner of a race into the folder to deploy: its files, its manifest, and proof that LOAD.md runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.machine import folders
from benchd.daemon.machine.ticker import show
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.protocol import Pack, PackedFiles
from benchd.daemon.measuring.supervisor import Supervisor, Turn
from benchd.daemon.records import Dtype, Environment, InputSpec, Record, encode, wall_now
from benchd.daemon.shipping import load_text, manifest
from benchd.daemon.shipping.manifest import LOAD, Manifest, ShipLimits
from benchd.daemon.shipping.race import Candidate, Race, RaceResult
from benchd.daemon.verdicts.results import JOURNAL

LOAD_TIMEOUT_S = 900.0


class ShipReport(Struct, frozen=True):
    """The output of `benchd ship --json`: the folder's manifest (null if nothing was shipped) and the race's result."""

    race: RaceResult
    folder: str | None = None
    manifest: Manifest | None = None


class NotShipped(BenchdError):
    """The winner's folder could not be created; the message gives the reason."""


def ship(race: Race, result: RaceResult, supervisor: Supervisor, asked: ShipLimits, out: Path) -> Manifest:
    """Build the winner's folder, run its LOAD.md and move it to `out` in one step; requires the machine's lock.

    Raises NotShipped if a file cannot be written, LOAD.md does not run, or `out` exists in the meantime.
    """
    try:
        return _shipped(race, result, supervisor, asked, out)
    except OSError as error:
        place = error.filename2 or error.filename or out
        raise NotShipped(
            f"{place}: {error.strerror}; the measurements are kept, and the same command continues from there"
        ) from error


def _shipped(race: Race, result: RaceResult, supervisor: Supervisor, ship_limits: ShipLimits, out: Path) -> Manifest:
    winner, session = race.named(str(result.winner)), supervisor.session
    folder = session.output / "deploy"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packed = _packed(race, winner.planned, supervisor, folder)
    first = winner.raced[0]  # the first process checked all images
    record = msgspec.structs.replace(race.record(winner, winner.confirmed), check=first.check, accuracy=first.accuracy)
    shipped = _manifest(winner, packed, record, _against(result, len(race.candidates)), ship_limits)
    (folder / LOAD).write_text(load_text.page(shipped))
    show(sys.stderr, "run its LOAD.md")
    _run_load(shipped, folder)
    (folder / JOURNAL).write_bytes(b"".join(encode(entry) + b"\n" for entry in [*race.records(), record]))
    shipped = manifest.write(folder, shipped)
    for path in [*folder.rglob("*"), folder]:  # the files must be on disk before the rename becomes visible
        folders.sync(path)
    manifest.remember(folder)
    folder.rename(out)
    shutil.rmtree(session.output, ignore_errors=True)  # the folder is shipped even if parts of the race's folder remain
    return shipped


def _packed(race: Race, planned: PlannedCase, supervisor: Supervisor, folder: Path) -> PackedFiles:
    """Have a worker write the files; raise NotShipped if it fails or the files contain a different model."""
    outcome = supervisor.process(Turn(planned, "deploy", 1, Pack(str(folder))))
    if mixed := race.clear_if_mixed(outcome):
        raise NotShipped(mixed)
    if outcome.packed is None:
        raise NotShipped(f"the files for {planned.case.variant.label} could not be created: {outcome.process.reason}")
    if outcome.check and not outcome.check.passed:
        raise NotShipped(f"the files for {planned.case.variant.label} give different answers: {outcome.check.note}")
    return outcome.packed


def _manifest(
    winner: Candidate, packed: PackedFiles, record: Record, against: str, ship_limits: ShipLimits
) -> Manifest:
    """Return the manifest without its resources; `record` contains the processes that confirmed the winner."""
    facts, environment = record.model, record.environment
    if facts is None or record.timing is None:
        raise NotShipped(f"{winner.name}: the processes that confirmed it were not timed")
    own = winner.planned.own
    return Manifest(
        name=own.model if own else record.case.model,
        created=wall_now(),
        tool_version=record.tool_version,
        case=record.case,
        options=facts.options,
        read=_read(facts.inputs, packed),
        inputs=packed.inputs,
        outputs=packed.outputs,
        preprocessing=packed.preprocessing,
        entry=packed.entry,
        provider=packed.provider,
        packages=packed.packages,
        weights_sha256=facts.weights_sha256,
        golden=packed.golden,
        asked=msgspec.structs.asdict(ship_limits),
        promised=manifest.promised(record),
        against=against,
        device=device_class(environment),
        device_id=record.device_id,
        environment=environment,
        resources=[],
    )


def _read(own: Sequence[InputSpec], packed: PackedFiles) -> list[InputSpec]:
    """Return the inputs of one item as the user gave them, but from the folder; an ONNX file names and types them."""
    specs = list(own or [InputSpec()] * (len(packed.inputs) if packed.provider else 0))
    for place, (spec, file) in enumerate(zip(specs, packed.stored, strict=False)):  # a catalog's module has no specs
        specs[place] = msgspec.structs.replace(spec, span=None, file=file, items=0, sha256="")
    if not packed.provider:
        return specs
    return [
        msgspec.structs.replace(
            spec,
            name=tensor.name,
            dtype=msgspec.convert(tensor.dtype, Dtype),
            shape=[size for place, size in enumerate(tensor.shape) if place != spec.batch_axis],
        )
        for spec, tensor in zip(specs, packed.inputs, strict=True)
    ]


def _against(result: RaceResult, candidates: int) -> str:
    """Describe how the runner-up, if any, compares with the winner."""
    verdict = result.verdict
    if candidates == 1:
        return "no other variant was tried"
    if verdict is None or verdict.effect is None or verdict.interval is None:
        return f"{result.runner_up} was not compared" if result.runner_up else "no other variant could be shipped"
    low, high = 1.0 + verdict.interval.low, 1.0 + verdict.interval.high
    return f"{result.runner_up} takes {1.0 + verdict.effect:.4g}x [{low:.4g}, {high:.4g}] as long"


def device_class(environment: Environment) -> str:
    """Return a readable description of the machine: its board or processor, its GPU, and its power mode."""
    processor = environment.board or environment.soc or environment.cpu_model
    parts = [processor, environment.gpu if environment.device != "cpu" else None, environment.power_mode]
    return ", ".join(part for part in parts if part)


def _run_load(shipped: Manifest, folder: Path) -> None:
    """Run LOAD.md's code in a fresh interpreter; raise NotShipped with its last output line if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-I", "-B", "-c", load_text.code(shipped)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise NotShipped(f"LOAD.md did not finish within {LOAD_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NotShipped(f"LOAD.md does not run here: {words}")


def refuse_existing(out: Path) -> None:
    """Raise UsageError if `out` already exists."""
    if out.exists() or out.is_symlink():
        remedy = f"verify it with `benchd verify {out}`, or remove it first" if out.is_dir() else "choose a new folder"
        raise UsageError(f"--output {out}: already exists; {remedy}")

"""From the winner of a race to the folder that is deployed: its files, its manifest, and proof that LOAD.md runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.machine import folders
from benchd.daemon.measuring import load_text
from benchd.daemon.measuring.plan import Planned
from benchd.daemon.measuring.race import Candidate, Race, Result
from benchd.daemon.measuring.supervisor import Supervisor, Turn
from benchd.daemon.records import Dtype, Environment, InputSpec, Record, encode, wall_now
from benchd.daemon.verdicts import figures, manifest, recommend
from benchd.daemon.verdicts.manifest import LOAD, MANIFEST, Asked, Manifest, Packed, Promised
from benchd.daemon.verdicts.results import JOURNAL, process_medians_ms

LOAD_TIMEOUT_S = 900.0


class NotShipped(BenchdError):
    """The winner's folder could not be made; the message says why."""


def ship(race: Race, found: Result, supervisor: Supervisor, asked: Asked, out: Path) -> Manifest:
    """Make the folder of the winner beside `out`, run its LOAD.md, and move it there whole; under the machine's lock.

    Raises NotShipped if a file cannot be made, LOAD.md does not run, or something has come to be at `out`.
    """
    try:
        return _shipped(race, found, supervisor, asked, out)
    except OSError as error:
        place = error.filename2 or error.filename or out
        raise NotShipped(
            f"{place}: {error.strerror}; what was measured is kept, and the same command goes on from there"
        ) from error


def _shipped(race: Race, found: Result, supervisor: Supervisor, asked: Asked, out: Path) -> Manifest:
    winner, session = race.named(str(found.winner)), supervisor.session
    made = session.output / "deploy"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    packed = _packed(race, winner.planned, supervisor, made)
    record = race.record(winner, winner.confirmed)
    shipped = _manifest(winner, packed, record, found, asked)
    (made / LOAD).write_text(load_text.page(shipped))
    _run_load(shipped, made)
    (made / JOURNAL).write_bytes(b"".join(encode(one) + b"\n" for one in [*race.records(), record]))
    shipped = msgspec.structs.replace(shipped, resources=manifest.resources(made))
    (made / MANIFEST).write_bytes(manifest.encode(shipped))
    for path in [*made.rglob("*"), made]:  # so that what the rename shows is on the disk
        folders.sync(path)
    manifest.remember(made)
    made.rename(out)
    shutil.rmtree(session.output, ignore_errors=True)  # the folder is shipped, whatever is left of its race
    return shipped


def _packed(race: Race, planned: Planned, supervisor: Supervisor, made: Path) -> Packed:
    """Have a worker write the files; raise NotShipped if it cannot, or if they are of another model than was raced."""
    outcome = supervisor.process(Turn(replace(planned, ship_to=str(made)), "deploy", 1))
    if mixed := race.begins_anew(outcome):
        raise NotShipped(mixed)
    if outcome.packed is None:
        raise NotShipped(f"the files of {planned.case.variant.label} were not made: {outcome.process.reason}")
    if outcome.check and not outcome.check.passed:
        raise NotShipped(f"the files of {planned.case.variant.label} are not what was measured: {outcome.check.note}")
    return outcome.packed


def _manifest(winner: Candidate, packed: Packed, record: Record, found: Result, asked: Asked) -> Manifest:
    """Return the manifest without its resources; the record is that of the processes that confirmed the winner."""
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
        asked=msgspec.structs.asdict(asked),
        promised=_promised(record, winner),
        against=_against(found),
        device=device_class(environment),
        device_id=record.device_id,
        environment=environment,
        resources=[],
    )


def _read(own: Sequence[InputSpec], packed: Packed) -> list[InputSpec]:
    """Return the inputs of one item as the user gave them, of a file by its own names and types."""
    if not packed.provider:
        return list(own)
    pairs = zip(own or [InputSpec()] * len(packed.inputs), packed.inputs, strict=True)
    return [
        msgspec.structs.replace(
            spec,
            name=one.name,
            dtype=msgspec.convert(one.dtype, Dtype),
            shape=[size for place, size in enumerate(one.shape) if place != spec.batch_axis],
        )
        for spec, one in pairs
    ]


def _promised(record: Record, winner: Candidate) -> Promised:
    timing, energy, first = record.timing, record.energy, winner.raced[0]
    assert timing is not None  # noqa: S101 - for the type checker: `_manifest` refuses it
    return Promised(
        processes_ms=process_medians_ms([record]),
        latency_ms=timing.median_ms,
        low_ms=timing.low_ms,
        high_ms=timing.high_ms,
        p99_ms=timing.p99_ms,
        energy_per_inference_j=energy.gross_per_inference_j if energy else None,
        energy_error_share=figures.energy_error_share(energy),
        memory_bytes=figures.memory_bytes(record),
        agreement=f"check ok{recommend.agreement(first.check)}",
        accuracy=first.accuracy.top1 if first.accuracy else None,
    )


def _against(found: Result) -> str:
    """Return the verdict of the runner-up against the winner in words."""
    verdict = found.verdict
    if verdict is None or verdict.effect is None or verdict.interval is None:
        return f"{found.runner_up}: not compared" if found.runner_up else "no other variant could ship"
    low, high = 1.0 + verdict.interval.low, 1.0 + verdict.interval.high
    return f"{found.runner_up} takes {1.0 + verdict.effect:.4g}x [{low:.4g}, {high:.4g}] its time"


def device_class(environment: Environment) -> str:
    """Return what a person calls the machine: its board or processor, its GPU, and its power mode."""
    processor = environment.board or environment.soc or environment.cpu_model
    parts = [processor, environment.gpu if environment.device != "cpu" else None, environment.power_mode]
    return ", ".join(part for part in parts if part)


def _run_load(shipped: Manifest, folder: Path) -> None:
    """Run LOAD.md's code in a fresh interpreter; raise NotShipped with its last line if it does not end well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-I", "-B", "-c", load_text.code(shipped)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise NotShipped(f"LOAD.md did not end within {LOAD_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NotShipped(f"LOAD.md does not run here: {words}")


def refuse_existing(out: Path) -> None:
    """Raise UsageError if something is at `out` already."""
    if out.exists() or out.is_symlink():
        remedy = f"verify it with `benchd verify {out}`, or remove it first" if out.is_dir() else "choose a new folder"
        raise UsageError(f"--out {out}: already there; {remedy}")

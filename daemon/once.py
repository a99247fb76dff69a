"""`bench-once`: one pass over a plan, from a request to an exit code; the same path that a service takes."""

import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec

from benchd.daemon import config, environment, identity, plan
from benchd.daemon.config import Config, Suite
from benchd.daemon.delivery.console import Screen, print_plan
from benchd.daemon.delivery.mqtt import parse_url
from benchd.daemon.delivery.sinks import JournalSink, MqttSink
from benchd.daemon.errors import UsageError
from benchd.daemon.lock import Busy
from benchd.daemon.plan import OwnModule, Planned
from benchd.daemon.process import ALLOCATOR
from benchd.daemon.recording import Pass
from benchd.daemon.records import Record
from benchd.daemon.supervisor import Settings, Sink, Supervisor
from benchd.kernels import cache

FREE_POLL_S = 0.5
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Request:
    """What the command line asks for. `suite` holds the fields that were given; they replace the configuration's."""

    suite: dict[str, object] = field(default_factory=dict)
    config: Path | None = None
    device: str = "auto"
    threads: int | None = None
    weights: Path | None = None
    data: str | None = None
    module: str | None = None
    input_shape: list[int] | None = None
    output: Path = Path("bench-out")
    mqtt: str | None = None
    as_json: bool = False
    wait: bool = False
    dry_run: bool = False


def run(request: Request) -> int:
    """Measure what the request asks for and return the exit code; raise BenchdError before anything is measured."""
    settings = config.read(request.config) if request.config else Config(suite=[Suite(preset="quick")])
    own = _own_module(request)
    machine = plan.inspect(_device(request))
    planned = plan.plan(_suites(settings, request), settings.limits, machine, own)
    _refuse_ambiguous_weights(request, planned)
    if request.dry_run:
        print_plan(sys.stdout, planned, plan.cannot_run(machine))
        return 0
    supervisor = Supervisor(
        planned,
        Settings(
            output=_writable(request.output, f"--output {request.output}"),
            cache=_writable(cache.folder(), "the cache folder (set XDG_CACHE_HOME to another)"),
            device=machine.device,
            sources=settings.sampling.sources,
            period_s=settings.sampling.period_s,
            threads=request.threads,
            weights=str(request.weights.resolve()) if request.weights else None,
            data=request.data,
            own=own,
        ),
        _pass(settings, machine.device, request),
        _sinks(settings, request),
    )
    _run_when_free(supervisor, request.wait)
    for failure in supervisor.failures:
        sys.stderr.write(f"warning: not kept: {failure}\n")
    return exit_code(planned, supervisor.records, supervisor.interrupted) or int(bool(supervisor.failures))


def _run_when_free(supervisor: Supervisor, wait: bool) -> None:
    """Run the pass; where another one is under way wait for its end, or raise Busy where nobody wants to."""
    busy = _try(supervisor)
    if busy and wait:
        sys.stderr.write(f"waiting: {busy}\n")
    while busy and wait:
        time.sleep(FREE_POLL_S)
        busy = _try(supervisor)
    if busy:
        raise busy


def _try(supervisor: Supervisor) -> Busy | None:
    try:
        supervisor.run()
    except Busy as busy:
        return busy
    return None


def _device(request: Request) -> str:
    if request.device not in DEVICES:
        raise UsageError(f"--device {request.device}: choose one of {', '.join(DEVICES)}")
    if request.threads is not None and request.threads < 1:
        raise UsageError(f"--threads {request.threads}: at least 1")
    return request.device


def _own_module(request: Request) -> OwnModule | None:
    if request.module is None:
        return None
    file, colon, function = request.module.rpartition(":")
    if not colon or not Path(file).is_file() or not function.isidentifier():
        raise UsageError(f"--module {request.module}: expected FILE.py:function of a file that exists")
    return OwnModule(f"{Path(file).resolve()}:{function}", request.input_shape)


def _suites(settings: Config, request: Request) -> list[Suite]:
    suites = settings.suite or [Suite()]
    try:
        return [msgspec.convert(msgspec.structs.asdict(suite) | request.suite, Suite) for suite in suites]
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from error


def _refuse_ambiguous_weights(request: Request, planned: Sequence[Planned]) -> None:
    if request.weights and not request.weights.is_file():
        raise UsageError(f"--weights {request.weights}: no such file")
    models = sorted({entry.case.model for entry in planned})
    if request.weights and len(models) > 1:
        raise UsageError(f"--weights is for one model; name it with --models (the plan holds {', '.join(models)})")


def _writable(folder: Path, name: str) -> Path:
    """Return the folder, made and tried out, so that nothing is measured in vain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.resolve()
    except OSError as error:
        raise UsageError(f"{name}: {folder} cannot be written: {error.strerror}") from error


def _pass(settings: Config, device: str, request: Request) -> Pass:
    return Pass(
        device_id=identity.device_id(settings.device.id),
        boot_id=identity.boot_id(),
        suite_id=uuid.uuid4().hex,
        tool_version=version("benchd"),
        environment=environment.describe(device, request.threads, allocator=ALLOCATOR),
    )


def _sinks(settings: Config, request: Request) -> list[Sink]:
    sinks: list[Sink] = [JournalSink(request.output / "records.jsonl"), Screen(sys.stdout, sys.stderr, request.as_json)]
    url = request.mqtt or settings.mqtt.url
    if url:
        sinks.insert(0, MqttSink(parse_url(url), settings.mqtt.timeout_s, request.output, sys.stderr))
    return sinks


def exit_code(planned: Sequence[Planned], records: Sequence[Record], interrupted: bool) -> int:
    """Return what the pass came to; where several hold, the first of 130, 7, 6, 1, 5."""
    by_name = {entry.case.case_id for entry in planned if entry.by_name}
    holds = {
        130: interrupted,
        7: any(record.status == "unsupported" and record.case_id in by_name for record in records),
        6: not any(record.status == "ok" for record in records),
        1: any(record.status in ("failed", "timeout") for record in records),
        5: any(record.check is not None and not record.check.passed for record in records),
    }
    return next((code for code, true in holds.items() if true), 0)

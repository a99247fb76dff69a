"""`bench-once`: one run over a plan, from a request to an exit code; the same path that a service takes."""

import keyword
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from benchd.daemon import config
from benchd.daemon.config import Config, Suite
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.machine import gpu, identity
from benchd.daemon.measuring import input_specs, own_python, plan
from benchd.daemon.measuring.plan import Machine, Own, OwnFile, OwnModule, Planned
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import Record
from benchd.daemon.reporting import report
from benchd.daemon.reporting.console import Screen, print_comparisons, print_plan
from benchd.daemon.verdicts import baseline, compare, noise_floor
from benchd.daemon.verdicts.compare import Comparison
from benchd.daemon.verdicts.recommend import Requirements, decide
from benchd.daemon.verdicts.statistics import MIN_EFFECT
from benchd.models import data_named


@dataclass(frozen=True)
class Request:
    """What the command line asks for. `suite` holds the fields that were given; they replace the configuration's."""

    suite: dict[str, object] = field(default_factory=dict)
    config: Path | None = None
    device: str = "auto"
    module: str | None = None
    onnx: Path | None = None
    inputs: list[str] = field(default_factory=list)
    artifacts: Path | None = None
    workspace_bytes: int | None = None
    output: Path = Path("bench-out")
    mqtt: str | None = None
    as_json: bool = False
    wait: bool = False
    dry_run: bool = False
    baseline: str | None = None
    fail_on: list[str] = field(default_factory=lambda: ["slower", "check"])
    page: bool = False
    max_accuracy_drop: float | None = None


def run(request: Request) -> int:
    """Measure what the request asks for and return the exit code; raise BenchdError before anything is measured."""
    settings = config.read(request.config) if request.config else Config(suite=[Suite(preset="quick")])
    own = _own(request)
    machine = plan.inspect(_device(request))
    suites = _suites(settings, request)
    planned = plan.plan(suites, settings.limits, machine, own, search=True)
    _refuse_absent_files(request, planned)
    if request.dry_run:
        print_plan(sys.stdout, planned, plan.cannot_run(machine))
        return 0
    stored = baseline.read(request.baseline) if request.baseline else []
    device_id = identity.device_id(settings.device.id)
    min_effect = noise_floor.min_effect(device_id, machine.device) if request.baseline else MIN_EFFECT
    if request.page:
        report.require_page()
    with _session(settings, request, machine) as session:
        supervisor = Supervisor(session, planned)
        supervisor.run()
    for failure in session.failures:
        sys.stderr.write(f"warning: not kept: {failure}\n")
    comparisons = baseline.against(stored, supervisor.records, min_effect) if request.baseline else []
    noise_floor.tell(min_effect, MIN_EFFECT, sys.stderr)
    _conclude(request, comparisons)
    unscored = _unscored(supervisor.records) if any(suite.accuracy for suite in suites) else {}
    for case_id, reason in unscored.items():
        sys.stderr.write(f"error: no accuracy of {case_id}, which was asked for: {reason}\n")
    passed = exit_code(
        planned, supervisor.records, session.interrupted, request.fail_on, comparisons, lacks_accuracy=bool(unscored)
    )
    return passed or int(bool(session.failures))


def _unscored(records: Sequence[Record]) -> dict[str, str]:
    """Return why each case that ran has no accuracy."""
    without = [record for record in records if record.status == "ok" and record.accuracy is None]
    return {record.case_id: record.missing["accuracy"] for record in without}


def _session(settings: Config, request: Request, machine: Machine) -> Session:
    return Session(
        settings,
        machine,
        made_output(request.output),
        [*lasting(request.output, settings.mqtt, sys.stderr, request.mqtt), _screen(request)],
        waiting=sys.stderr if request.wait else None,
        given_artifacts=_folder(request.artifacts),
        workspace_bytes=request.workspace_bytes,
    )


def _conclude(request: Request, comparisons: Sequence[Comparison]) -> None:
    """Print the verdicts, and where the page lies; on stderr where stdout is for records."""
    out = sys.stderr if request.as_json else sys.stdout
    if comparisons:
        print_comparisons(out, comparisons, as_json=False)
    if request.page:
        try:
            out.write(f"{report.page(request.output)}\n")
        except BenchdError as error:  # older lines of the file: what was measured now is kept
            sys.stderr.write(f"warning: no page: {error}\n")


def _device(request: Request) -> str:
    if request.device not in ("auto", "cpu"):
        gpu.check(request.device)
    return request.device


def _own(request: Request) -> Own | None:
    if request.module and request.onnx:
        raise UsageError("--module and --onnx: give one of the two")
    if "models" in request.suite and (request.module or request.onnx):
        raise UsageError("--models beside --module or --onnx: a model of your own runs alone; leave one of them out")
    if request.artifacts and (request.module or request.onnx):
        raise UsageError("--artifacts holds files of the catalog's models; measure a file of your own with --onnx")
    if request.onnx:
        return _own_file(request.onnx, request)
    if request.module:
        return own_module(request.module, request.inputs)
    if request.inputs:
        raise UsageError("--input is for --module and --onnx: the models of the catalog know theirs")
    return None


def own_module(module: str, given: Sequence[str]) -> OwnModule:
    """Return the module of `FILE.py:function` or `package.module:function`; raise UsageError for what it cannot be."""
    file, colon, function = module.rpartition(":")
    inputs = [msgspec.structs.replace(spec, dtype=spec.dtype or "float32") for spec in input_specs.parse(given)]
    unfit = next((spec.name for spec in inputs if spec.name and not _is_argument(spec.name)), None)
    if unfit:
        raise UsageError(f"--input {unfit}: no argument of a function has this name; give that of one of forward's")
    if not colon or not function.isidentifier():
        raise UsageError(f"--module {module}: expected FILE.py:FUNCTION or package.module:FUNCTION")
    if not file.endswith(".py") and all(map(str.isidentifier, file.split("."))) and not Path(file).is_file():
        package = file.partition(".")[0]
        if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"--module {module}: no module {package!r} in this folder or environment")
        return OwnModule(module, inputs, str(Path.cwd()))
    if not Path(file).is_file():
        raise UsageError(f"--module {module}: {file}: no such file")
    if not file.endswith(".py"):
        raise UsageError(f"--module {module}: {file} is no .py file")
    own_python.refuse(Path(file), function)
    return OwnModule(f"{Path(file).resolve()}:{function}", inputs)


def _is_argument(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _own_file(path: Path, request: Request) -> OwnFile:
    if not path.is_file():
        raise UsageError(f"--onnx {path}: no such file")
    return OwnFile.at(path.resolve(), request.inputs)


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise UsageError(f"--artifacts {path}: no such folder; `benchd export MODEL --out {path}` makes one")
    return path and path.resolve()


def _suites(settings: Config, request: Request) -> list[Suite]:
    suites = settings.suite or [Suite()]
    # models replace a file too
    given = request.suite | ({"onnx": None, "inputs": []} if "models" in request.suite else {})
    try:
        return [msgspec.convert(msgspec.structs.asdict(suite) | given, Suite) for suite in suites]
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from error


def _refuse_absent_files(request: Request, planned: Sequence[Planned]) -> None:
    """Raise UsageError for data and labels that are not there, before anything is measured."""
    for images, labels in {(entry.data, entry.labels) for entry in planned if entry.data}:
        _refuse_absent_images(str(images), labels)
    if request.max_accuracy_drop is not None and not any(entry.accuracy for entry in planned):
        raise UsageError("--max-accuracy-drop: no accuracy would be measured; give --data, and --accuracy or --weights")


def _refuse_absent_images(images: str, labels: str | None) -> None:
    try:
        _, folder = data_named.parse(images, labels)
        if labels:
            data_named.read_listed(folder, labels)
    except data_named.DataError as error:
        raise UsageError(str(error)) from error


def _screen(request: Request) -> Screen:
    requirements = Requirements(max_accuracy_drop=request.max_accuracy_drop)
    return Screen(sys.stdout, sys.stderr, request.as_json, requirements)


def exit_code(
    planned: Sequence[Planned],
    records: Sequence[Record],
    interrupted: bool,
    fail_on: Sequence[str] = ("slower", "check"),
    comparisons: Sequence[Comparison] = (),
    *,
    lacks_accuracy: bool = False,
) -> int:
    """Return what the pass came to; where several hold, the first of 130, 2, 7, 6, 1, 5, 3, 4.

    6 is that nothing was measured, or with `lacks_accuracy` not the accuracy that was asked for.
    `fail_on` says which of a failed check (5), slower (3) and inconclusive (4) against the baseline are to fail.
    """
    by_name = {entry.case.case_id for entry in planned if entry.by_name}
    checks_failed = any(record.check is not None and record.check.verdict == "failed" for record in records)
    holds = {
        130: interrupted,
        2: any("usage_error" in record.flags for record in records),
        7: any(record.status == "unsupported" and record.case_id in by_name for record in records),
        6: lacks_accuracy or not any(record.status == "ok" for record in records),
        1: any(record.status in ("failed", "timeout") for record in records)
        or any(decision.mixed for decision in decide(records, Requirements())),
        5: checks_failed and "check" in fail_on,
    }
    return next((code for code, true in holds.items() if true), compare.exit_code(comparisons, fail_on))

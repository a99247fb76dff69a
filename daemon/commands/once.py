"""`bench-once`: one run over a plan, from command line to exit code, measured as the service measures."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import Version, application, arguments
from benchd.daemon.config import Config, Suite
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Planned
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import DIRECTIONS, PROVIDERS, SCENARIOS, Record
from benchd.daemon.reporting import report
from benchd.daemon.reporting.comparisons import print_comparisons
from benchd.daemon.reporting.console import Screen, print_plan
from benchd.daemon.verdicts import baseline as baselines
from benchd.daemon.verdicts import compare
from benchd.daemon.verdicts.compare import FAIL_ON, Comparison
from benchd.daemon.verdicts.recommend import Requirements, decide

app = application()


@app.command(epilog="Example: bench-once --models vim_tiny --variants eager,amp --batch-sizes 1,4 --output out")
def once(
    models: Annotated[
        str | None, typer.Option(help="Models, separated by commas; torchvision:NAME and timm:NAME too.", metavar="A,B")
    ] = None,
    variants: Annotated[str | None, typer.Option(help="Variants, separated by commas.", metavar="A,B")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Batch sizes, separated by commas.", metavar="1,4")] = None,
    option: arguments.Option = None,
    beside: Annotated[
        str | None, typer.Option(help="Another case to run at this rate during the measurement.", metavar="CASE:30Hz")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="quick, standard or thorough (default: the --config's, else quick).")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Fresh processes per case.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random weights and inputs.")] = None,
    threads: Annotated[str | None, typer.Option(help="CPU threads of the model (default: all).", metavar="1,2")] = None,
    device: arguments.Device = "auto",
    direction: Annotated[str | None, typer.Option(help="inference, training, or both.", metavar="A,B")] = None,
    scenario: Annotated[str | None, typer.Option(help=f"{', '.join(SCENARIOS)}.", metavar="A,B")] = None,
    streams: Annotated[
        str | None, typer.Option(help="Streams that run one model at the same time.", metavar="1,2,4")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second of a server, each rate a case.", metavar="30Hz,60Hz")
    ] = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Find the highest rate of a server that meets --deadline.")
    ] = False,
    deadline: arguments.Deadline = None,
    percentile: arguments.Percentile = None,
    queue: Annotated[int | None, typer.Option(help="Requests that may wait; others are dropped (default 32).")] = None,
    weights: arguments.Weights = None,
    data: arguments.Data = None,
    labels: Annotated[
        Path | None, typer.Option(help="Class labels of the images in --data: one path and one index per line.")
    ] = None,
    accuracy: arguments.Accuracy = None,
    calibration: arguments.Calibration = None,
    max_accuracy_drop: Annotated[
        str | None, typer.Option(help="Maximum accuracy loss against plain fp32 for a variant to ship.", metavar="1%")
    ] = None,
    provider: Annotated[str | None, typer.Option(help="Provider of ONNX Runtime: cpu, cuda or tensorrt.")] = None,
    dla: Annotated[int | None, typer.Option(help="DLA core of a Jetson, for TensorRT variants.", min=0)] = None,
    artifacts: arguments.Artifacts = None,
    workspace: arguments.Workspace = None,
    module: arguments.Module = None,
    onnx: arguments.OnnxFile = None,
    reference: Annotated[
        Path | None, typer.Option(help="The fp32 file that a quantised --onnx was made from.", metavar="FILE")
    ] = None,
    input_: arguments.Inputs = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file; options on the command line override it.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for records.jsonl and the raw times.")] = Path("bench-out"),
    mqtt: arguments.Publish = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="Compare with a result file or with the `stored` baseline.", metavar="FILE|stored"),
    ] = None,
    fail_on: arguments.FailOn = "slower,check",
    page: Annotated[
        bool, typer.Option("--report", help="Also write report.html with all records in --output.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON record per line instead of a table.")] = False,
    wait: arguments.Wait = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and measure nothing.")] = False,
    version: Version = False,
) -> None:
    """Measure deployment variants of models on this machine; print a table, store and publish the records."""
    if dry_run and json:
        raise UsageError("--json with --dry-run: a plan has no records; leave one of them out")
    given = {
        "models": arguments.names("--models", models),
        "variants": arguments.names("--variants", variants),
        "batch_sizes": arguments.whole_numbers("--batch-sizes", batch_sizes),
        "options": arguments.options(option or []),
        "threads": arguments.whole_numbers("--threads", threads),
        "directions": arguments.choices("direction", arguments.names("--direction", direction), DIRECTIONS),
        "scenarios": arguments.choices("scenario", arguments.names("--scenario", scenario), SCENARIOS),
        "streams": arguments.whole_numbers("--streams", streams),
        "rates_hz": [
            arguments.quantity("--rate", one, arguments.RATE_UNITS) for one in arguments.names("--rate", rate)
        ],
        "find_rate": find_rate or None,
        "deadline_ms": arguments.limit("--deadline", deadline, arguments.LATENCY_UNITS),
        "percentile": percentile,
        "queue": queue,
        "beside": beside,
        "preset": preset,
        "processes": processes,
        "seed": seed,
        "provider": provider and arguments.choices("provider", [provider], PROVIDERS)[0],
        "dla": dla,
        "weights": weights and plan.named_weights(weights),
        "data": data,
        "labels": labels and str(labels.resolve()),
        "accuracy": arguments.image_count(accuracy) if accuracy else None,
        "calibration": calibration and arguments.calibrated_with(calibration),
    }
    fails = arguments.choices("--fail-on", arguments.names("--fail-on", fail_on), list(FAIL_ON))
    requirements = Requirements(
        max_accuracy_drop=arguments.accuracy_drop(max_accuracy_drop) if max_accuracy_drop else None
    )
    workspace_bytes = arguments.byte_count("--workspace", workspace) if workspace else None
    settings = configuration.read(config) if config else Config()
    suites = _suites(settings, {name: value for name, value in given.items() if value not in (None, [], {})})
    own = arguments.user_model(
        module, onnx, input_ or [], beside={"--models": models, "--artifacts": artifacts}, reference=reference
    )
    machine = plan.inspect(device)
    planned = plan.plan(suites, settings.limits, machine, own, search=True)
    plan.refuse_absent_images(planned, requirements.max_accuracy_drop)
    given_artifacts, _ = arguments.folder_of_files(artifacts), mqtt and parse_url(mqtt)
    stored = baselines.read(baseline) if baseline else []
    if page:
        report.require_page()
    folder = made_output(output, create=not dry_run)
    if dry_run:
        return print_plan(sys.stdout, planned, plan.cannot_run(machine))
    screen = Screen(sys.stdout, sys.stderr, json, requirements)
    with Session(
        settings,
        machine,
        folder,
        [*lasting(folder, settings.mqtt, sys.stderr, mqtt), screen],
        waiting=arguments.waits(wait),
        given_artifacts=given_artifacts,
        workspace_bytes=workspace_bytes,
    ) as session:
        supervisor = Supervisor(session, planned)
        supervisor.run()
    records = supervisor.records
    comparisons = baselines.against(stored, records) if baseline else []
    _conclude(comparisons, output if page else None, sys.stderr if json else sys.stdout)
    lacks_accuracy = any(suite.accuracy for suite in suites) and _lacks_accuracy(records, sys.stderr)
    unstored = session.unstored(sys.stderr)
    code = exit_code(planned, records, session.interrupted, fails, comparisons, lacks_accuracy=lacks_accuracy)
    raise typer.Exit(code or unstored)


def _lacks_accuracy(records: Sequence[Record], err: TextIO) -> bool:
    """Name each measured case without the accuracy that was asked for; return whether there is any."""
    unscored = [record for record in records if record.status == "ok" and record.accuracy is None]
    for record in unscored:
        reason = record.missing["accuracy"]
        err.write(f"error: requested accuracy of {record.case_id} was not measured: {reason}\n")
    return bool(unscored)


def _conclude(comparisons: Sequence[Comparison], page_of: Path | None, out: TextIO) -> None:
    if comparisons:
        print_comparisons(out, comparisons, as_json=False)
    if page_of:
        try:
            out.write(f"{report.page(page_of)}\n")
        except BenchdError as error:  # caused by older lines of the file: the new records are stored
            sys.stderr.write(f"warning: no page: {error}\n")


def _suites(settings: Config, given: dict[str, object]) -> list[Suite]:
    """Return the configuration's suites with the fields in `given`; --models also replaces a user's own model."""
    suites = settings.suite or [Suite(preset="quick")]
    own: dict[str, object] = {"onnx": None, "module": None, "inputs": [], "weights": None}
    replaced = own if "models" in given else {}
    changed = [msgspec.structs.asdict(suite) | (replaced if suite.own else {}) | given for suite in suites]
    try:
        return [msgspec.convert(fields, Suite) for fields in changed]
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from error


def exit_code(
    planned: Sequence[Planned],
    records: Sequence[Record],
    interrupted: bool,
    fail_on: Sequence[str] = ("slower", "check"),
    comparisons: Sequence[Comparison] = (),
    *,
    lacks_accuracy: bool = False,
) -> int:
    """Return the exit code of a run; if several apply, the first of 130, 2, 7, 6, 1, 5, 3, 4.

    6 means that nothing was measured or, with `lacks_accuracy`, that the requested accuracy was not.
    `fail_on` selects which of a failed check (5), slower (3) and inconclusive (4) against the baseline fail the run.
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

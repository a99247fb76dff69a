"""`bench-once`: one run through a plan, from command line to exit code, measured in the same way as by the service."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import Version, application, arguments, options
from benchd.daemon.commands.completion import cases
from benchd.daemon.config import Config, Suite
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.machine.ticker import show
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import Record
from benchd.daemon.reporting import report
from benchd.daemon.reporting.comparisons import print_comparisons
from benchd.daemon.reporting.console import Screen, print_plan
from benchd.daemon.verdicts import baseline as baselines
from benchd.daemon.verdicts import compare, results
from benchd.daemon.verdicts.compare import FAIL_ON, Comparison
from benchd.daemon.verdicts.recommend import Requirements, decide

app = application()

OF_OWN_MODEL: dict[str, object] = {
    **dict.fromkeys(("module", "onnx", "nir", "reference", "weights")),
    "inputs": [],
}
"""The fields of a suite that specify a user's model, with their values if there is none."""


@app.command(epilog="Example: bench-once --models vim_tiny --variants eager,amp --batch-sizes 1,4 --output out")
@options.of_suite(*options.fields())
def once(
    given: dict[str, Any],
    case: Annotated[
        str | None,
        typer.Option(help="Repeat the case with this id, as shown in a record.", metavar="ID", autocompletion=cases),
    ] = None,
    records_: Annotated[
        Path | None,
        typer.Option("--records", help="Where to look up --case (default: --output).", metavar="FILE|DIR"),
    ] = None,
    device: arguments.Device = "auto",
    max_accuracy_drop: arguments.MaxAccuracyDrop = None,
    artifacts: arguments.Artifacts = None,
    workspace: arguments.Workspace = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file; options on the command line override it.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for records.jsonl and the raw times.", metavar="DIR")] = Path(
        "bench-out"
    ),
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
    quiet_for: arguments.QuietFor = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan without measuring.")] = False,
    version: Version = False,
) -> None:
    """Measure deployment variants of models on this machine; print a table, store and publish the records."""
    if dry_run and json:
        raise UsageError("--json and --dry-run: give only one of them; a plan has no records")
    fails = arguments.choices("--fail-on", arguments.names("--fail-on", fail_on), list(FAIL_ON))
    requirements = Requirements(
        max_accuracy_drop=arguments.accuracy_drop(max_accuracy_drop) if max_accuracy_drop else None
    )
    workspace_bytes = arguments.byte_count("--workspace", workspace) if workspace else None
    settings = configuration.read(config) if config else Config()
    if case:
        given = _again(case, records_, output, given) | given
        settings = msgspec.structs.replace(settings, suite=[])
    own = arguments.own_model(given, beside={"--models": given.get("models"), "--artifacts": artifacts})
    suites = _suites(settings, given)
    machine = plan.inspect(device)
    planned = plan.plan(suites, settings.limits, machine, own, search=True)
    plan.refuse_absent_images(planned, requirements.max_accuracy_drop)
    start = arguments.start(wait, quiet_for)
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
        start=start,
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


def _again(case: str, records: Path | None, output: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that repeat a case: those in its newest record, else those in its id."""
    where = records or output
    records_of_case = results.of_case(where, case) if records or (where / results.JOURNAL).exists() else []
    if records_of_case:
        fields = plan.again(records_of_case[-1])
    else:
        sys.stderr.write(f"note: {where} has no record of {case}: measuring it with the default weights and inputs\n")
        fields = msgspec.structs.asdict(plan.suite_of(case, "quick"))
    replaced = {"models", *OF_OWN_MODEL} if {"module", "onnx", "nir"} & given.keys() else set()
    known = options.fields().keys() - replaced
    return {name: value for name, value in fields.items() if name in known and value not in (None, [], {})}


def _lacks_accuracy(records: Sequence[Record], err: TextIO) -> bool:
    """List each measured case that lacks the requested accuracy; return whether there is any."""
    unscored = [record for record in records if record.status == "ok" and record.accuracy is None]
    for record in unscored:
        reason = record.missing["accuracy"]
        err.write(f"error: the requested accuracy of {record.case_id} was not measured: {reason}\n")
    return bool(unscored)


def _conclude(comparisons: Sequence[Comparison], page_of: Path | None, out: TextIO) -> None:
    if comparisons:
        print_comparisons(out, comparisons, as_json=False)
    if page_of:
        show(sys.stderr, "write the page")
        try:
            out.write(f"{report.page(page_of)}\n")
        except BenchdError as error:  # caused by older lines in the file; the new records are already stored
            sys.stderr.write(f"warning: no page: {error}\n")


def _suites(settings: Config, given: dict[str, object]) -> list[Suite]:
    """Return the configuration's suites with the fields in `given`; --models also replaces a user's own model."""
    suites = settings.suite or [Suite(preset="quick")]
    replaced = OF_OWN_MODEL if "models" in given else {}
    return [options.suite((replaced if suite.own else {}) | given, suite) for suite in suites]


def exit_code(
    planned: Sequence[PlannedCase],
    records: Sequence[Record],
    interrupted: bool,
    fail_on: Sequence[str] = ("slower", "check"),
    comparisons: Sequence[Comparison] = (),
    *,
    lacks_accuracy: bool = False,
) -> int:
    """Return the exit code of a run; if several apply, the first of 130, 2, 7, 6, 1, 5, 3, 4.

    The code is 6 if nothing was measured or, with `lacks_accuracy`, if the requested accuracy was not. `fail_on`
    selects which of these fail the run: a failed check (5), and a result that is slower than the baseline (3) or
    inconclusive (4).
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

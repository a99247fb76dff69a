"""`benchd compare`: two sets of records, or two cases measured now on this machine."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import application, arguments, options
from benchd.daemon.commands.options import OfferedField
from benchd.daemon.config import Config
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import EXIT_CODES, UsageError
from benchd.daemon.machine.quiet import Start
from benchd.daemon.measuring import paired, plan, user_model
from benchd.daemon.measuring.paired import Request
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.records import Record, Variant
from benchd.daemon.reporting import comparisons as shown
from benchd.daemon.reporting.console import SlowStages
from benchd.daemon.verdicts import compare as verdicts
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.compare import FAIL_ON, Comparison, exit_code

app = application()


@app.command(epilog="Example: benchd compare before after; benchd compare --live vim_tiny,eager vim_tiny,custom")
@options.of_suite("inputs", "samples", OfferedField("threads", "With --live: CPU threads of the model.", single=True))
def compare(
    given: dict[str, Any],
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Two result files or folders; with --live, one or two cases such as vim_tiny,eager,b1.",
            metavar="A [B]",
        ),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Measure both alternately, in fresh processes.")] = False,
    aa: Annotated[bool, typer.Option("--aa", help="Measure one case against itself: the noise floor.")] = False,
    python: Annotated[
        list[Path] | None, typer.Option(help="With --live: the Python interpreter for each side.", metavar="BIN/python")
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(help="With --live: your own module, or one per side.", metavar="FILE.py:FUNCTION"),
    ] = None,
    onnx: Annotated[
        list[Path] | None, typer.Option(help="With --live: an ONNX file, or one per side.", metavar="FILE")
    ] = None,
    nir: Annotated[
        list[str] | None, typer.Option(help="With --live: your own NIR file, or one per side.", metavar="FILE")
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help="Only these variants; with --live, one comparison for each.", metavar="A,B")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Only these batch sizes; with --live, one comparison for each.", metavar="1,4")
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(help="Number of pairs (default 7, extended to 11 or 15 while undecided).")
    ] = None,
    min_effect: Annotated[
        str, typer.Option(help="Smallest difference that counts as FASTER or SLOWER.", metavar="0.5%")
    ] = "0.5%",
    fail_on: arguments.FailOn = "check,slower,inconclusive",
    preset: Annotated[
        str, typer.Option(help="With --live: how long each process measures.", metavar="quick|standard|thorough")
    ] = "quick",
    device: arguments.Device = "auto",
    config: Annotated[Path | None, typer.Option(help="With --live: a TOML file with limits and delivery.")] = None,
    output: Annotated[Path, typer.Option(help="With --live: folder for the records.", metavar="DIR")] = Path(
        "bench-out"
    ),
    junit: Annotated[Path | None, typer.Option(help="Also write the verdicts as JUnit XML.", metavar="FILE")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write the verdicts as Markdown, for a comment.", metavar="FILE")
    ] = None,
    wait: arguments.Wait = None,
    quiet_for: arguments.QuietFor = None,
    json: arguments.AsJson = False,
) -> None:
    """Report whether B is faster than A, slower or the same."""
    measuring = {"--python": python, "--module": module, "--onnx": onnx, "--nir": nir, "--pairs": pairs}
    measuring |= {options.fields()[name].flag: value for name, value in given.items()}
    for option, value in (measuring | {"--config": config}).items():
        if value is not None and not (live or aa):
            raise UsageError(f"{option} is for --live or --aa: two result files are compared as they are")
    fails = arguments.choices("--fail-on", arguments.names("--fail-on", fail_on), list(FAIL_ON))
    chosen = [
        [Variant.parse(name).name for name in arguments.names("--variants", variants)],
        [f"b{size}" for size in arguments.whole_numbers("--batch-sizes", batch_sizes)],
    ]
    request = Request(
        cases=sides or [],
        pythons=[str(path) for path in python or []],
        modules=user_model.of_sides(module, onnx, nir, given.get("inputs", [])),
        pairs=pairs,
        min_effect=arguments.quantity("--min-effect", min_effect, {"%": 0.01}),
        preset=preset,
        samples=given.get("samples"),
        is_aa=aa,
    )
    for path in filter(None, (junit, markdown)):
        _empty(path)
    if live or aa:
        settings = configuration.read(config) if config else Config()
        start = arguments.start(wait, quiet_for)
        chosen.append([f"threads={count}" for count in given.get("threads", [])])
        comparisons, code = measured(_requests(request, chosen), settings, plan.inspect(device), output, start)
    else:
        comparisons, code = of_files([Path(side) for side in sides or []], request.min_effect, chosen)
    shown.print_comparisons(sys.stdout, comparisons, json)
    texts = {junit: shown.junit(comparisons, fails), markdown: shown.markdown(comparisons)}
    unwritten = [_unwritten(path, text) for path, text in texts.items() if path]
    code = code or exit_code(comparisons, fails)
    if code == 0 and {comparison.verdict.answer for comparison in comparisons} <= {"inconclusive"}:
        sys.stderr.write(
            "nothing was decided: every comparison is inconclusive (--fail-on inconclusive makes it fail)\n"
        )
    raise typer.Exit(code or max(unwritten, default=0))


def _unwritten(path: Path, text: str) -> int:
    """Write the verdicts to a file; return 1, with a warning, if that fails after all the work, else 0."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"warning: not stored: {path}: {error.strerror}\n")
        return 1
    return 0


def _empty(path: Path) -> None:
    """Empty a file, so that a run that ends early does not leave an earlier run's verdicts behind."""
    try:
        path.write_text("", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; choose a file that can be written") from error


def _requests(request: Request, chosen: Sequence[Sequence[str]]) -> list[Request]:
    """Return a request for each chosen variant and batch size, or a single request if none is chosen.

    Two models of the user's are compared in eager mode, or ONNX files on ONNX Runtime, unless a case is given.
    """
    usual = user_model.usual_variant(request.modules)
    cases = request.cases or [""] * any(chosen) or [usual] * (len(request.modules) == 2)
    counts = (len(cases), len(request.pythons), len(request.modules))
    if request.is_aa and (counts[0] != 1 or max(counts) > 1):
        raise UsageError("--aa compares one case with itself")
    if not request.is_aa and (max(counts) != 2 or counts[0] == 0):
        raise UsageError("--live takes two cases, or one case and two --python, --module, --onnx or --nir")
    if not request.modules and not all(cases):
        raise UsageError("--live with --variants and --batch-sizes alone: name the model too, as in vim_tiny")
    combinations = list(product(*(words or [""] for words in chosen)))
    return [
        replace(
            request, cases=[",".join(filter(None, (case, *words))) for case in cases], comparisons=len(combinations)
        )
        for words in combinations
    ]


def measured(
    requests: Sequence[Request], settings: Config, machine: Machine, output: Path, start: Start
) -> tuple[list[Comparison], int]:
    """Measure the comparisons in order; return them and the first of EXIT_CODES that applies, or 0.

    If a measurement is interrupted, the rest are skipped. Before any measurement, raises UsageError for an invalid
    case, and NotAvailable for one that cannot run here.
    """
    planned = [paired.planned_sides(request, settings.limits, machine) for request in requests]
    folder, comparisons, codes = made_output(output), list[Comparison](), list[int]()
    sinks = [*lasting(folder, settings.mqtt, sys.stderr), SlowStages(sys.stderr)]
    with Session(settings, machine, folder, sinks, start=start) as session:
        try:
            for request, of_it in zip(requests, planned, strict=True):
                comparison, code = paired.compare(request, of_it, session, sys.stderr)
                comparisons.append(comparison)
                codes.append(code)
                if session.interrupted:
                    break
        finally:
            session.end()
    codes.append(session.unstored(sys.stderr))
    return comparisons, next((code for code in EXIT_CODES if code in codes), 0)


def of_files(paths: Sequence[Path], min_effect: float, chosen: Sequence[Sequence[str]]) -> tuple[list[Comparison], int]:
    """Compare two files or folders of results, optionally only the cases with the chosen variants and batch sizes.

    The exit code is 6 if nothing was measured, 1 if a case that the first side measured failed on the second, else 0.
    """
    if len(paths) != 2:
        raise UsageError(f"compare takes two result files, not {len(paths)}; use --live to compare cases")
    first, second = ([result for result in results.read(path) if _is_chosen(result, *chosen)] for path in paths)
    comparisons = verdicts.compare(first, second, min_effect)
    if any(record.status == "ok" for record in (*first, *second)):
        return comparisons, int(any(comparison.broken_off for comparison in comparisons))
    which = "succeeded" if first or second else "matches these variants and batch sizes"
    sys.stderr.write(f"nothing was compared: no record in {paths[0]} or {paths[1]} {which}\n")
    return comparisons, 6


def _is_chosen(record: Record, variants: Sequence[str], sizes: Sequence[str]) -> bool:
    name, size = record.case.variant.name, f"b{record.case.batch_size}"
    return name in (variants or [name]) and size in (sizes or [size])

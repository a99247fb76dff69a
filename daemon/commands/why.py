"""`benchd why`: finds out what makes one side slower or faster than the other."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import application, arguments, options
from benchd.daemon.config import Config
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import UsageError
from benchd.daemon.journal import explaining
from benchd.daemon.machine import folders
from benchd.daemon.machine.quiet import Start
from benchd.daemon.measuring import paired, plan, user_model
from benchd.daemon.measuring.paired import Request
from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.session import Session, made_output, temporary_output
from benchd.daemon.reporting.comparisons import print_comparisons
from benchd.daemon.reporting.console import SlowStages
from benchd.daemon.shipping import manifest, promise, race, verifying
from benchd.daemon.verdicts import compare as verdicts
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.layers import LayerVerdict
from benchd.daemon.why import environments, foreign
from benchd.daemon.why.bridge import Bridging
from benchd.daemon.why.bridge import lines as way
from benchd.daemon.why.comparing import Explaining
from benchd.daemon.why.comparisons import Comparing, SearchInterrupted
from benchd.daemon.why.environments import EnvironmentSide
from benchd.daemon.why.text import lines

T = TypeVar("T")
ONE_PER_SIDE = "or a file of results; once for B alone, or once per side"

app = application()


@app.command(epilog="Example: benchd why vim_tiny,eager --python old/bin/python --python new/bin/python")
@options.of_suite("inputs", "samples")
def why(
    given: dict[str, Any],
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            help="One or two cases such as vim_tiny,eager,b1, a folder from benchd ship, or two result files.",
            metavar="A [B]",
        ),
    ] = None,
    python: Annotated[
        list[Path] | None, typer.Option(help="The Python interpreter for each side.", metavar="BIN/python")
    ] = None,
    lock: Annotated[
        list[Path] | None, typer.Option(help=f"Lines of NAME==VERSION, {ONE_PER_SIDE}.", metavar="FILE")
    ] = None,
    env: Annotated[
        list[Path] | None, typer.Option(help=f"Lines of NAME=VALUE, {ONE_PER_SIDE}.", metavar="FILE")
    ] = None,
    module: Annotated[
        list[str] | None, typer.Option(help="Your own module, or one per side.", metavar="FILE.py:FUNCTION")
    ] = None,
    onnx: Annotated[list[Path] | None, typer.Option(help="An ONNX file, or one per side.", metavar="FILE")] = None,
    nir: Annotated[list[str] | None, typer.Option(help="Your own NIR file, or one per side.", metavar="FILE")] = None,
    theirs: Annotated[
        Path | None, typer.Option(help="Another tool's result; explain why it differs from ours.", metavar="FILE")
    ] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="Install the packages of --lock from this folder only.", metavar="DIR")
    ] = None,
    index: Annotated[
        str | None, typer.Option(help="Install the packages of --lock from this index.", metavar="URL")
    ] = None,
    min_effect: Annotated[str, typer.Option(help="Smallest change to explain.", metavar="1%")] = "1%",
    preset: Annotated[
        str, typer.Option(help="How long each process measures.", metavar="quick|standard|thorough")
    ] = "quick",
    device: arguments.Device = "auto",
    config: arguments.ConfigFile = None,
    output: Annotated[Path, typer.Option(help="Folder for the records and the log.", metavar="DIR")] = Path("why-out"),
    wait: arguments.Wait = None,
    quiet_for: arguments.QuietFor = None,
    json: arguments.AsJson = False,
) -> None:
    """Find which layers, and which package or setting, make B slower or faster than A.

    Repeatedly halves the differences between two environments or cases by measuring combinations of them. Repeat an
    interrupted command to resume it. Exits with 4 if noise hides the cause.
    """
    named = sides or []
    paths = [Path(side) for side in named if Path(side).exists()]
    search = [*(python or []), *(lock or []), *(env or [])]
    settings = configuration.read(config) if config else Config()
    start = arguments.start(wait, quiet_for)
    if paths and (search or module or onnx or nir or len(paths) != len(named)):
        raise UsageError(f"{paths[0]}: a folder or a file of results is compared as it is, without further options")
    if len(paths) == 1:
        raise typer.Exit(_of_folder(paths[0], settings, device, start, json))
    if len(paths) == 2:
        raise typer.Exit(_of_records(paths[0], paths[1], json))
    own = user_model.of_sides(module, onnx, nir, given.get("inputs", []))
    cases = named or [user_model.usual_variant(own)] * bool(own)
    effect = arguments.quantity("--min-effect", min_effect, {"%": 0.01})
    request = Request(cases, preset, effect, modules=own, samples=given.get("samples"), layers=not theirs)
    _refuse_counts(len(cases), len(own), search=bool(search), theirs=bool(theirs))
    foreign_result = foreign.read(theirs) if theirs else None
    pythons = [str(path) for path in _per_side("--python", python)]
    source = (
        ["--no-index", "--find-links", str(wheels.resolve())] if wheels else ["--index-url", index] if index else []
    )
    machine, folder = plan.inspect(device), made_output(output)
    planned = paired.planned_sides(request, settings.limits, machine)
    is_search = search or (len(own) < 2 and _settings(planned) > 1)
    both = _sides(pythons, lock, env, source) if is_search else None
    sinks = [*lasting(folder, settings.mqtt, sys.stderr), SlowStages(sys.stderr)]
    with Session(settings, machine, folder, sinks, start=start) as session:
        try:
            comparing = Comparing(session, sys.stderr)
            if foreign_result:
                code = _of_theirs(Bridging(foreign_result, request, comparing), as_json=json)
            elif both:
                code = _of_environments(Explaining(*both, request, comparing), [] if lock else pythons, as_json=json)
            else:
                code = _of_cases(request, planned, session, as_json=json)
        except SearchInterrupted as interrupt:
            sys.stderr.write(f"{interrupt}\n")
            code = 130
        finally:
            session.end()
    raise typer.Exit(code or session.unstored(sys.stderr))


def _refuse_counts(cases: int, models: int, *, search: bool, theirs: bool) -> None:
    if theirs:
        is_right = cases == 1 and models < 2 and not search
    elif search:
        is_right = cases in {1, 2} and models < 2
    else:
        is_right = max(cases, models) == 2
    if not is_right:
        raise UsageError(
            "give one case, as in vim_tiny,eager, and what differs between the sides: --python, --lock or --env, or "
            "--theirs FILE; or two cases, two --module or two --onnx"
        )


def _settings(planned: Sequence[PlannedCase]) -> int:
    """Return the number of settings in which two cases of a model differ; 0 for a single case or two models."""
    first, *others = (entry.case.case_id for entry in planned)
    changed = environments.changed_parts(first, others[0]) if others else {}
    return 0 if "model" in changed else len(changed)


def _of_theirs(bridging: Bridging, *, as_json: bool) -> int:
    bridge = bridging.bridge()
    sys.stdout.write((msgspec.json.encode(bridge).decode() if as_json else "\n".join(way(bridge))) + "\n")
    return 0


def _of_environments(explaining_both: Explaining, originals: Sequence[str], *, as_json: bool) -> int:
    explanation = explaining_both.explain(originals)
    text = msgspec.json.encode(explanation).decode() if as_json else "\n".join(lines(explanation))
    sys.stdout.write(f"{text}\n")
    return 4 if explanation.is_open else 0


def _of_cases(request: Request, planned: Sequence[PlannedCase], session: Session, *, as_json: bool) -> int:
    comparison, code = paired.compare(request, planned, session, sys.stderr)
    print_comparisons(sys.stdout, [comparison], as_json)
    is_changed = comparison.verdict.answer in ("slower", "faster")
    if is_changed and comparison.layers is None and not as_json:
        sys.stdout.write("where: the noise hides which layer did it, or this variant reports no layers\n")
    if is_changed:
        return code or _exit_code(comparison.layers)
    return code or (4 if comparison.verdict.answer == "inconclusive" else 0)


def _exit_code(layers: LayerVerdict | None) -> int:
    """Return the exit code for a change: 0 if the layers explain it, else 4."""
    return 0 if layers and (layers.alike or layers.changes) else 4


def _of_records(first: Path, second: Path, as_json: bool) -> int:
    """Attribute the differences between two files of results whose processes were profiled."""
    before, after = results.read(first), results.read(second)
    comparisons = [comparison for comparison in verdicts.compare(before, after, 0.0) if comparison.layers]
    if not comparisons:
        raise UsageError(
            f"{first} and {second}: no case in both changed beyond noise and has layer times; measure both "
            f"environments again: benchd why CASE --lock {first} --lock {second} --env {first} --env {second}"
        )
    print_comparisons(sys.stdout, comparisons, as_json)
    return 0


def _of_folder(folder: Path, settings: Config, device: str, start: Start, as_json: bool) -> int:
    """Measure a shipped folder again, and attribute the changes since it was shipped."""
    with explaining(folder):
        shipped = manifest.read(folder)
    verifying.refuse_untrusted(folder, shipped, trust_code=False)
    is_of_cpu = device == "auto" and shipped.environment.device == "cpu"
    machine = plan.inspect("cpu" if is_of_cpu else device)
    with (
        temporary_output() as output,
        Session(settings, machine, output, [SlowStages(sys.stderr)], start=start) as session,
    ):
        verified = verifying.verify(folder, shipped, session, plan.limited(race.LIMITS, settings.limits))
    if session.interrupted:
        return 130
    words = [promise.line(verified), *(f"    {text}" for text in promise.explained(verified))]
    words += [f"    {verified.layers.sentence}"] if verified.layers and verified.answer != "slower" else []
    words += [f"    changed since: {change}" for change in verified.changed]
    sys.stdout.write((msgspec.json.encode(verified).decode() if as_json else "\n".join(words)) + "\n")
    if verified.answer == "slower":
        return _exit_code(verified.layers)
    return promise.EXIT_CODES[verified.answer]


def _per_side(option: str, given: Sequence[T] | None) -> list[T]:
    """Return the values of A and B, or none; raise UsageError if there are more."""
    if len(given or []) > 2:
        raise UsageError(f"{option}: at most once per side")
    return list(given or [])


def _sides(
    pythons: Sequence[str],
    lock: Sequence[Path] | None,
    env: Sequence[Path] | None,
    source: Sequence[str],
) -> tuple[EnvironmentSide, EnvironmentSide]:
    installed = [environments.installed(python) for python in pythons or [sys.executable]]
    for python, packages in zip(pythons, installed, strict=False):
        if "benchd" not in packages.by_name:
            raise UsageError(f"--python {python}: benchd is not installed there")
    pins = _both([environments.pins(path) for path in _per_side("--lock", lock)], list[str]())
    variables = _both([environments.variables(path) for path in _per_side("--env", env)], dict[str, str]())
    cache = folders.cache() / "wheels"
    first, second = (
        EnvironmentSide(environments.with_pins(into, pinned, cache, source), given)
        for into, pinned, given in zip(installed * (3 - len(installed)), pins, variables, strict=True)
    )
    return first, second


def _both(given: Sequence[Any], absent: Any) -> list[Any]:
    """Return the values of A and B; a single value is B's."""
    return [*[absent] * (2 - len(given)), *given]

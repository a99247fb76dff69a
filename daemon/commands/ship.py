"""`benchd ship`: turns a model and limits into a folder to deploy, measuring as few processes as the decision needs."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import application, arguments, options
from benchd.daemon.commands.completion import models
from benchd.daemon.commands.options import OfferedField
from benchd.daemon.config import Config, LimitsConfig, Suite
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine.signals import ending
from benchd.daemon.machine.ticker import show
from benchd.daemon.measuring import plan
from benchd.daemon.measuring import power_modes as modes
from benchd.daemon.measuring.plan import Machine, PlannedCase
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.records import UserModel
from benchd.daemon.reporting import report
from benchd.daemon.reporting.console import SlowStages
from benchd.daemon.shipping import folder as shipping
from benchd.daemon.shipping import race
from benchd.daemon.shipping.folder import ShipReport
from benchd.daemon.shipping.manifest import MANIFEST, Manifest, ShipLimits
from benchd.daemon.shipping.race import Race, RaceResult
from benchd.daemon.verdicts import doubts

BENCHD = Path(sys.executable).with_name("benchd")
ROUNDS = (
    "each round times every variant that is left in a fresh process, until one wins and more processes confirm it; "
    "b1: one input at a time; [...]: the range of a value\n"
)
INTERVAL = "[...]: where the true value lies with 95 % confidence"
ENERGY_UNITS = {"J": 1, "mJ": 1e-3, "uJ": 1e-6}

app = application()


@app.command(epilog="Example: benchd ship torchvision:resnet18 --max-latency 50ms --output resnet18-shipped")
@options.of_suite(
    *("module", "onnx", "nir", "reference", "inputs", "options"),
    *("weights", "data", "samples", "labels", "accuracy", "metric", "calibration"),
    OfferedField("batch_sizes", "Batch sizes that compete."),
    OfferedField("variants", "Variants that compete (default: all that can run here)."),
    OfferedField("threads", single=True),
)
def ship(
    given: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model from `benchd list`, or torchvision:NAME, timm:NAME or hf:ORG/NAME.", autocompletion=models
        ),
    ] = None,
    max_latency: arguments.MaxLatency = None,
    max_energy: Annotated[str | None, typer.Option(help="Maximum energy per inference.", metavar="50mJ")] = None,
    max_memory: arguments.MaxMemory = None,
    max_power: arguments.MaxPower = None,
    rate: Annotated[str | None, typer.Option(help="Minimum inferences per second.", metavar="30Hz")] = None,
    max_accuracy_drop: arguments.MaxAccuracyDrop = None,
    min_agreement: arguments.MinAgreement = None,
    power_modes: Annotated[
        str | None, typer.Option(help="Ship in each of these power modes, to DIR-MODE.", metavar="15W,25W")
    ] = None,
    device: arguments.Device = "auto",
    min_effect: Annotated[
        str,
        typer.Option(help="Variants this close count as equally fast; the simplest of them ships.", metavar="1%"),
    ] = "1%",
    minutes: Annotated[float, typer.Option(help="Race time limit in minutes; the winner is always confirmed.")] = 15.0,
    out: Annotated[Path, typer.Option("--output", help="The folder to write.", metavar="DIR")] = Path("shipped"),
    config: arguments.ConfigFile = None,
    page: Annotated[bool, typer.Option("--report", help="Also write the measurements to DIR.html.")] = False,
    wait: arguments.Wait = None,
    quiet_for: arguments.QuietFor = None,
    json: arguments.AsJson = False,
) -> None:
    """Pick the variant to deploy, and write its folder.

    Exits with 4 if nothing meets the limits or the time was too short. Repeat an interrupted command to resume it.
    Switching power modes needs sudo.
    """
    if power_modes is not None:
        command = of_each_mode([str(BENCHD), *sys.argv[1:]], out)
        manifest_path = f"{out}-{{mode}}/{MANIFEST}"
        raise typer.Exit(
            modes.run(arguments.names("--power-modes", power_modes), command, sys.stderr, made=manifest_path)
        )
    ship_limits = ShipLimits(
        max_latency_ms=arguments.limit("--max-latency", max_latency, arguments.LATENCY_UNITS),
        max_energy_j=arguments.limit("--max-energy", max_energy, ENERGY_UNITS),
        max_memory_bytes=arguments.limit("--max-memory", max_memory, arguments.MEMORY_UNITS),
        max_power_w=arguments.limit("--max-power", max_power, arguments.POWER_UNITS),
        rate_hz=arguments.limit("--rate", rate, arguments.RATE_UNITS),
        min_agreement=arguments.agreement(min_agreement),
        max_accuracy_drop=arguments.accuracy_drop(max_accuracy_drop) if max_accuracy_drop else None,
        min_effect=arguments.quantity("--min-effect", min_effect, {"%": 0.01}),
    )
    _refuse(ship_limits, minutes)
    own = arguments.own_model(given, beside={"MODEL": model})
    if not (model or own):
        raise UsageError("give a model, as in `benchd ship vim_tiny`, or your own with --module, --onnx or --nir")
    suite = options.suite(given | {"models": [model] if model else [], "directions": ["inference"]})
    shipping.refuse_existing(out)
    if page:
        report.require_page()
        if _page_of(out).is_dir():
            raise UsageError(f"--report: {_page_of(out)} is a folder; move it away, or choose another --output")
    start, machine = arguments.start(wait, quiet_for), plan.inspect(device)
    settings = configuration.read(config) if config else Config()
    candidates = _candidates(suite, settings.limits, machine, own)
    plan.refuse_absent_images(candidates, ship_limits.max_accuracy_drop)
    folder = made_output(out.with_name(f"{out.name}.race"))  # contains the race until `out` is complete
    with Session(settings, machine, folder, [SlowStages(sys.stderr, counts=True)], start=start) as session:
        raise typer.Exit(_ship(session, candidates, ship_limits, minutes, out, page=page, json=json))


def of_each_mode(words: Sequence[str], out: Path) -> list[str]:
    """Return this command for a single power mode, without the option that lists the modes and with its own output."""
    place = next(i for i, word in enumerate(words) if word.partition("=")[0] == "--power-modes")
    behind = place + (1 if "=" in words[place] else 2)
    return [*words[:place], *words[behind:], "--output", f"{out}-{{mode}}"]


def _refuse(ship_limits: ShipLimits, minutes: float) -> None:
    if ship_limits.min_effect <= 0.0:
        raise UsageError("--min-effect 0%: no two times are exactly equal; give the smallest difference that counts")
    if not minutes > 0.0:
        raise UsageError(f"--minutes {minutes:g}: must be more than 0")


def _candidates(suite: Suite, limits: LimitsConfig, machine: Machine, own: UserModel | None) -> list[PlannedCase]:
    """Return the cases that can run here, with the limits of a race; raise NotAvailable if there are none."""
    planned = plan.plan([suite], limits, machine, own)
    for entry in planned:
        if reason := _why_not(entry):
            sys.stderr.write(f"not {entry.case.variant.label}: {reason}\n")
    of_race = plan.limited(race.LIMITS, limits)
    left = [replace(entry, limits=of_race, preset=race.PRESET) for entry in planned if not _why_not(entry)]
    if not left:
        raise NotAvailable("none of these variants can run here; `benchd doctor` says what is missing")
    return left


def _why_not(entry: PlannedCase) -> str | None:
    no_file = "int8 within PyTorch is quantised where it runs and has no file to deploy: ship onnxruntime-int8"
    return entry.reason or (no_file if entry.case.variant.needs_torchao else None)


def _ship(
    session: Session,
    candidates: list[PlannedCase],
    ship_limits: ShipLimits,
    minutes: float,
    out: Path,
    *,
    page: bool,
    json: bool,
) -> int:
    """Run the race and create the winner's folder; return the exit code.

    The machine's lock is held throughout: the log of a race that is still running must not be read, let alone replaced.
    """
    supervisor = Supervisor(session, candidates)
    sys.stderr.write(ROUNDS)
    with session.measuring(ending()):
        shipping.refuse_existing(out)  # another process may have created the folder while this one waited
        course = Race(supervisor, ship_limits, minutes, sys.stderr)
        result = course.run()
        if session.interrupted:
            sys.stderr.write(f"{result.reason}\n")
            return 130
        if not result.winner:
            _write(ShipReport(result), f"nothing shipped: {result.reason}", json=json)
            return 4 if any(record.status == "ok" for record in course.records()) else 6
        show(sys.stderr, "write the folder")
        try:
            shipped = shipping.ship(course, result, supervisor, ship_limits, out)
        except shipping.NotShipped as error:
            sys.stderr.write(f"error: {error}\n")
            return 130 if session.interrupted else 1
    _write(ShipReport(result, str(out), shipped), _told(shipped, result, out, course), json=json)
    if page:
        written = report.page(out, _page_of(out))
        (sys.stderr if json else sys.stdout).write(f"{written}\n")
    return 0


def _write(shipped: ShipReport, words: str, *, json: bool) -> None:
    sys.stdout.write(f"{msgspec.json.encode(shipped).decode() if json else words}\n")


def _page_of(out: Path) -> Path:
    """Return the path of the page, which is next to the folder because the folder must not change any more."""
    return out.with_name(f"{out.name}.html")


def _told(shipped: Manifest, result: RaceResult, out: Path, course: Race) -> str:
    check = course.named(str(result.winner)).raced[0].check
    promised, case = shipped.promised, shipped.case
    interval = f" [{promised.low_ms:.4g}, {promised.high_ms:.4g}]" if promised.low_ms and promised.high_ms else ""
    others = [name for name in result.tied if name != result.winner]
    least = f"{100 * (shipped.asked.get('min_effect') or 0.0):.2g} %"
    tied = f" (equally fast within {least}: {', '.join(others)}; it is the simplest)" if others else ""
    doubtful = f" (doubtful: {doubts.words(result.flags)})" if result.flags else ""
    files = len(shipped.resources) + 2  # the manifest and its digest
    lines = [
        f"{shipped.name} b{case.batch_size}: ship: {result.winner}  {promised.latency_ms:.4g}{interval} ms"
        f"{tied}{doubtful}",
        f"    {shipped.against}{doubtful}",
        *([f"    {INTERVAL}"] if "[" in f"{interval}{shipped.against}" else []),
        *(f"    {limit}" for limit in course.limits_of(str(result.winner))),
        *([f"    check: {check.note}"] if check and check.note else []),
        f"    {out}: {files} files, {sum(resource.bytes for resource in shipped.resources) / 1e6:.1f} MB, "
        f"after {course.measured_s:.0f} s of measuring; `benchd verify {out}` tests it",
    ]
    return "\n".join(lines)

"""`benchd why`: what makes one side slower or faster than the other."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchd.daemon import config as configuration
from benchd.daemon.commands import application, arguments, options
from benchd.daemon.config import Config
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import folders
from benchd.daemon.measuring import plan, user_model
from benchd.daemon.measuring.paired import Request
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.reporting.console import SlowStages
from benchd.daemon.why import environments
from benchd.daemon.why.comparing import Explaining, Interrupted
from benchd.daemon.why.environments import Side
from benchd.daemon.why.text import lines

app = application()
ONE_PER_SIDE = "once for B alone, or once per side"


@app.command(epilog="Example: benchd why vim_tiny,eager --python old/bin/python --python new/bin/python")
@options.of_suite("inputs", "samples")
def why(
    given: dict[str, Any],
    case: Annotated[str, typer.Argument(help="The case, as `benchd compare --live` takes it.")] = "",
    python: Annotated[
        list[Path] | None, typer.Option(help="The Python interpreter of each side.", metavar="BIN/python")
    ] = None,
    lock: Annotated[
        list[Path] | None, typer.Option(help=f"Lines of NAME==VERSION, {ONE_PER_SIDE}.", metavar="FILE")
    ] = None,
    env: Annotated[
        list[Path] | None, typer.Option(help=f"Lines of NAME=VALUE, {ONE_PER_SIDE}.", metavar="FILE")
    ] = None,
    threads: Annotated[list[int] | None, typer.Option(help=f"CPU threads of the model, {ONE_PER_SIDE}.")] = None,
    module: Annotated[str | None, typer.Option(help="Your own module.", metavar="FILE.py:FUNCTION")] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="Take the packages of --lock from this folder alone.", metavar="DIR")
    ] = None,
    index: Annotated[str | None, typer.Option(help="Take them from this package index.", metavar="URL")] = None,
    min_effect: arguments.MinEffect = "1%",
    preset: Annotated[str, typer.Option(help="How long each process measures.")] = "quick",
    device: arguments.Device = "auto",
    config: arguments.ConfigFile = None,
    output: Annotated[Path, typer.Option(help="Folder for the records and the log.", metavar="DIR")] = Path("why-out"),
    wait: arguments.Wait = None,
    quiet_for: arguments.QuietFor = None,
    json: arguments.AsJson = False,
) -> None:
    """Find which package or setting makes B slower or faster than A.

    Tries the differences by halves, in environments that it makes from both. Repeat an interrupted command to resume
    it. Exits with 4 if noise hides the cause.
    """
    if not case and not module:
        raise UsageError("name the case, as in vim_tiny,eager")
    pythons = [str(path) for path in _per_side("--python", python)]
    source = (
        ["--no-index", "--find-links", str(wheels.resolve())] if wheels else ["--index-url", index] if index else []
    )
    sides = _sides(pythons, lock, env, threads, source)
    own = [user_model.module(module, given.get("inputs", []))] if module else []
    effect = arguments.quantity("--min-effect", min_effect, {"%": 0.01})
    request = Request([case or "eager"], preset, effect, modules=own, samples=given.get("samples"))
    settings = configuration.read(config) if config else Config()
    machine, folder = plan.inspect(device), made_output(output)
    sinks = [*lasting(folder, settings.mqtt, sys.stderr), SlowStages(sys.stderr)]
    with Session(settings, machine, folder, sinks, start=arguments.start(wait, quiet_for)) as session:
        try:
            explanation = Explaining(*sides, request, session, sys.stderr).explain(pythons if not lock else ())
        except Interrupted as interrupt:
            sys.stderr.write(f"{interrupt}\n")
            raise typer.Exit(130) from None
        finally:
            session.end()
    code = session.unstored(sys.stderr)
    text = msgspec.json.encode(explanation).decode() if json else "\n".join(lines(explanation))
    sys.stdout.write(f"{text}\n")
    raise typer.Exit(code or (4 if explanation.is_open else 0))


def _per_side(option: str, given: Sequence[Any] | None) -> list[Any]:
    """Return the values of A and B, or none; raise UsageError for more."""
    if len(given or []) > 2:
        raise UsageError(f"{option}: at most once per side")
    return list(given or [])


def _sides(
    pythons: Sequence[str],
    lock: Sequence[Path] | None,
    env: Sequence[Path] | None,
    threads: Sequence[int] | None,
    source: Sequence[str],
) -> tuple[Side, Side]:
    here = [environments.installed(python) for python in pythons or [sys.executable]]
    pins = _both([environments.pins(path) for path in _per_side("--lock", lock)], list[str]())
    variables = _both([environments.variables(path) for path in _per_side("--env", env)], dict[str, str]())
    counts = _both(_per_side("--threads", threads), None)
    cache = folders.cache() / "wheels"
    first, second = (
        Side(environments.with_pins(into, pinned, cache, source), given, count)
        for into, pinned, given, count in zip(here * (3 - len(here)), pins, variables, counts, strict=True)
    )
    return first, second


def _both(given: Sequence[Any], absent: Any) -> list[Any]:
    """Return the values of A and B; a single one is B's."""
    return [*[absent] * (2 - len(given)), *given]

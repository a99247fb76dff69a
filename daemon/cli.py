"""The commands `bench-once` and `benchd`: parse, build, call; no logic of their own."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.errors import BenchdError, NotAvailable

_once = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
_benchd = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


def bench_once() -> None:
    """Run the command `bench-once`."""
    _exit_with(_once)


def benchd() -> None:
    """Run the command `benchd`."""
    _exit_with(_benchd)


def _exit_with(app: Callable[[], None]) -> None:
    """Show an error that a user can act on as one line, with the exit code of its kind."""
    try:
        app()
    except BenchdError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(7 if isinstance(error, NotAvailable) else 2)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


@_once.command(epilog="Example: bench-once --models vim_tiny --variants eager,amp --batch-sizes 1,4 --output out")
def once(
    models: Annotated[str | None, typer.Option(help="Models, separated by commas.", metavar="A,B")] = None,
    variants: Annotated[str | None, typer.Option(help="Variants, separated by commas.", metavar="A,B")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Batch sizes, separated by commas.", metavar="1,4")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A model's option and its values; may be repeated.", metavar="NAME=1,2")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="quick, standard or thorough.")] = None,
    processes: Annotated[int | None, typer.Option(help="Fresh processes a case.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random weights and inputs.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the model; all of them by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    direction: Annotated[str | None, typer.Option(help="inference, training, or both.", metavar="A,B")] = None,
    scenario: Annotated[str | None, typer.Option(help="single_stream, offline, or both.", metavar="A,B")] = None,
    weights: Annotated[Path | None, typer.Option(help="A checkpoint for the one model of the plan.")] = None,
    data: Annotated[str | None, typer.Option(help="Real images.", metavar="cifar10:DIR|imagefolder:DIR")] = None,
    module: Annotated[str | None, typer.Option(help="A module of your own.", metavar="FILE.py:FUNCTION")] = None,
    input_: Annotated[str | None, typer.Option("--input", help="Shape of one input.", metavar="3x224x224")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file; options given here replace its own.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for records.jsonl and the raw times.")] = Path("bench-out"),
    mqtt: Annotated[str | None, typer.Option(help="Publish there.", metavar="mqtt://HOST[:PORT]")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON record a line instead of a table.")] = False,
    wait: Annotated[
        bool | None,
        typer.Option("--wait/--no-wait", help="Wait until the machine is free; by default on a terminal."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and measure nothing.")] = False,
) -> None:
    """Measure deployment variants of models on this machine; print a table, keep and publish the records."""
    from benchd.daemon import once as one_pass  # noqa: PLC0415 - --help stays fast
    from benchd.daemon.arguments import choices, options, shape, whole_numbers  # noqa: PLC0415
    from benchd.daemon.records import DIRECTIONS, SCENARIOS  # noqa: PLC0415

    given = {
        "models": _names(models),
        "variants": _names(variants),
        "batch_sizes": whole_numbers("--batch-sizes", _names(batch_sizes)),
        "options": options(option or []),
        "directions": choices("direction", _names(direction), DIRECTIONS),
        "scenarios": choices("scenario", _names(scenario), SCENARIOS),
        "preset": preset,
        "processes": processes,
        "seed": seed,
    }
    request = one_pass.Request(
        suite={name: value for name, value in given.items() if value not in (None, [], {})},
        config=config,
        device=device,
        threads=threads,
        weights=weights,
        data=data,
        module=module,
        input_shape=shape(input_) if input_ else None,
        output=output,
        mqtt=mqtt,
        as_json=json,
        wait=sys.stderr.isatty() if wait is None else wait,
        dry_run=dry_run,
    )
    raise typer.Exit(one_pass.run(request))


@_benchd.callback()
def _root() -> None:
    """Benchmark deployment variants of models on edge devices: speed, clocks, memory and agreement in one record."""


@_benchd.command("list", epilog="Example: benchd list --json")
def list_(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile and list the Triton kernels; needs no GPU.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List models, options and variants, or the kernels for GPUs."""
    from benchd.daemon.delivery.console import print_catalog, print_kernels  # noqa: PLC0415

    if kernels:
        print_kernels(sys.stdout, sys.stderr, json)
    else:
        print_catalog(sys.stdout, json)


@_benchd.command(epilog="Example: benchd schema > record.schema.json")
def schema() -> None:
    """Print the JSON Schema of a record."""
    import msgspec  # noqa: PLC0415

    from benchd.daemon.records import json_schema  # noqa: PLC0415

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(json_schema())).decode() + "\n")


@_benchd.command(epilog="Example: benchd replay bench-out --mqtt mqtt://broker.local")
def replay(
    folder: Annotated[Path, typer.Argument(help="The output folder of bench-once.")],
    mqtt: Annotated[str, typer.Option(help="Publish there.", metavar="mqtt://HOST[:PORT]")],
    timeout_s: Annotated[float, typer.Option(help="Give up after so many seconds.")] = 60.0,
    dead: Annotated[bool, typer.Option("--dead", help="Send what a broker has refused once more.")] = False,
) -> None:
    """Send the results of a folder that no broker has taken yet."""
    from benchd.daemon.delivery.replay import replay as send  # noqa: PLC0415

    raise typer.Exit(send(folder, mqtt, timeout_s, sys.stdout, dead=dead))


@_benchd.command("run", epilog="Example: benchd run --config /etc/benchd/benchd.toml")
def run_(
    config: Annotated[Path, typer.Option(help="The TOML file of the service.")] = Path("/etc/benchd/benchd.toml"),
) -> None:
    """Run the service: measure what the configuration schedules, publish it, answer commands."""
    from benchd.daemon.service import run  # noqa: PLC0415

    raise typer.Exit(run(config))


if __name__ == "__main__":
    benchd()

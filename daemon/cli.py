"""The commands `bench-once` and `benchd`: parse, build, call; no logic of their own."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchd.daemon.errors import BenchdError, NotAvailable, UsageError

if TYPE_CHECKING:
    from benchd.daemon.delivery.mqtt import Broker

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


_CaFile = Annotated[
    str | None, typer.Option(help="Authority of the broker's certificate; the system's by default.", metavar="FILE")
]
_CertificateFile = Annotated[
    str | None, typer.Option(help="A certificate of this client, where the broker asks for one.", metavar="FILE")
]
_KeyFile = Annotated[
    str | None, typer.Option(help="The key of that certificate, where another file holds it.", metavar="FILE")
]

_Weights = Annotated[
    str | None,
    typer.Option(
        help="A checkpoint for the one model, or `demo`: the trained ones that ship.", metavar="FILE|demo|random"
    ),
]
_Data = Annotated[
    str | None,
    typer.Option(help="Real images; `demo`: the digits that ship.", metavar="demo|cifar10:DIR|imagefolder:DIR"),
]
_Wait = Annotated[
    bool | None, typer.Option("--wait/--no-wait", help="Wait until the machine is free; by default on a terminal.")
]


def _broker(url: str, ca_file: str | None, certificate_file: str | None, key_file: str | None) -> "Broker":
    """Return the broker of a URL with the files that TLS takes."""
    from benchd.daemon.delivery.mqtt import parse_url  # noqa: PLC0415

    return replace(parse_url(url), ca_file=ca_file, certificate_file=certificate_file, key_file=key_file)


def _waits(wait: bool | None) -> bool:
    return sys.stderr.isatty() if wait is None else wait


def _names(text: str | None) -> list[str]:
    """Return what stands between the commas; raise UsageError for text that names nothing."""
    names = [name.strip() for name in text.split(",") if name.strip()] if text is not None else []
    if text is not None and not names:
        raise UsageError(f"{text!r} names nothing: give values separated by commas, or leave the option out")
    return names


@_once.command(epilog="Example: bench-once --models vim_tiny --variants eager,amp --batch-sizes 1,4 --output out")
def once(
    models: Annotated[
        str | None,
        typer.Option(help="Models, separated by commas; torchvision:NAME and timm:NAME too.", metavar="A,B"),
    ] = None,
    variants: Annotated[str | None, typer.Option(help="Variants, separated by commas.", metavar="A,B")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Batch sizes, separated by commas.", metavar="1,4")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A model's option and its values; may be repeated.", metavar="NAME=1,2")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="quick, standard or thorough; with no --config quick by default.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Fresh processes a case.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random weights and inputs.")] = None,
    threads: Annotated[
        str | None, typer.Option(help="CPU threads of the model; all of them by default.", metavar="1,2")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, GPU-UUID or auto.")] = "auto",
    direction: Annotated[str | None, typer.Option(help="inference, training, or both.", metavar="A,B")] = None,
    scenario: Annotated[
        str | None,
        typer.Option(help="single_stream, offline, periodic, wake_up, cold_start, sustained.", metavar="A,B"),
    ] = None,
    weights: _Weights = None,
    data: _Data = None,
    labels: Annotated[
        Path | None, typer.Option(help="Class indices of the images in that folder: a path and an index per line.")
    ] = None,
    accuracy: Annotated[
        str | None, typer.Option(help="Top-1 over all of --data, or over this many of its images.", metavar="full|N")
    ] = None,
    max_accuracy_drop: Annotated[
        str | None, typer.Option(help="Against plain fp32; a variant that may lose more does not ship.", metavar="1%")
    ] = None,
    provider: Annotated[str | None, typer.Option(help="ONNX Runtime's: cpu, cuda or tensorrt.")] = None,
    artifacts: Annotated[
        Path | None, typer.Option(help="Exported files to use before any is made.", metavar="DIR")
    ] = None,
    workspace: Annotated[str | None, typer.Option(help="What a TensorRT build may use.", metavar="1GiB")] = None,
    module: Annotated[
        str | None, typer.Option(help="A module of your own, by file or by package.", metavar="FILE.py:FUNCTION")
    ] = None,
    onnx: Annotated[Path | None, typer.Option(help="An ONNX file of your own.", metavar="FILE")] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="An input of your own model without its batch, as 3x224x224 or ids=int64:16; one for each.",
            metavar="[NAME=][TYPE:]SIZES",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file; options given here replace its own.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for records.jsonl and the raw times.")] = Path("bench-out"),
    mqtt: Annotated[str | None, typer.Option(help="Publish there.", metavar="mqtt://HOST[:PORT]")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with it: a result file, or `stored`.", metavar="FILE|stored")
    ] = None,
    fail_on: Annotated[
        str, typer.Option(help="What ends with its exit code: slower, check, inconclusive.", metavar="A,B")
    ] = "slower,check",
    page: Annotated[bool, typer.Option("--report", help="Write report.html of all records in --output.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON record a line instead of a table.")] = False,
    wait: _Wait = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and measure nothing.")] = False,
) -> None:
    """Measure deployment variants of models on this machine; print a table, keep and publish the records."""
    from benchd.daemon.commands import once as one_pass  # noqa: PLC0415 - --help stays fast
    from benchd.daemon.commands.arguments import (  # noqa: PLC0415
        accuracy_drop,
        byte_count,
        choices,
        image_count,
        options,
        whole_numbers,
    )
    from benchd.daemon.measuring.plan import named_weights  # noqa: PLC0415
    from benchd.daemon.records import DIRECTIONS, PROVIDERS, SCENARIOS  # noqa: PLC0415
    from benchd.daemon.verdicts.compare import FAIL_ON  # noqa: PLC0415

    given = {
        "models": _names(models),
        "variants": _names(variants),
        "batch_sizes": whole_numbers("--batch-sizes", _names(batch_sizes)),
        "options": options(option or []),
        "threads": whole_numbers("--threads", _names(threads)),
        "directions": choices("direction", _names(direction), DIRECTIONS),
        "scenarios": choices("scenario", _names(scenario), SCENARIOS),
        "preset": preset,
        "processes": processes,
        "seed": seed,
        "provider": provider and choices("provider", [provider], PROVIDERS)[0],
        "weights": weights and named_weights(weights),
        "data": data,
        "labels": labels and str(labels.resolve()),
        "accuracy": image_count(accuracy) if accuracy else None,
    }
    request = one_pass.Request(
        suite={name: value for name, value in given.items() if value not in (None, [], {})},
        config=config,
        device=device,
        module=module,
        onnx=onnx,
        inputs=input_ or [],
        artifacts=artifacts,
        workspace_bytes=byte_count("--workspace", workspace) if workspace else None,
        output=output,
        mqtt=mqtt,
        as_json=json,
        wait=_waits(wait),
        dry_run=dry_run,
        baseline=baseline,
        fail_on=choices("--fail-on", _names(fail_on or None), list(FAIL_ON)),
        page=page,
        max_accuracy_drop=accuracy_drop(max_accuracy_drop) if max_accuracy_drop else None,
    )
    raise typer.Exit(one_pass.run(request))


@_benchd.callback()
def _root() -> None:
    """Benchmark deployment variants of models on edge devices: speed, clocks, memory and agreement in one record."""


@_benchd.command(epilog="Example: benchd compare before after; benchd compare --live vim_tiny,eager vim_tiny,custom")
def compare(
    sides: Annotated[list[str], typer.Argument(help="Two result files or folders; with --live, cases.")],
    live: Annotated[bool, typer.Option("--live", help="Measure both by turns, in fresh processes.")] = False,
    aa: Annotated[bool, typer.Option("--aa", help="Measure one case against itself: the noise floor.")] = False,
    python: Annotated[
        list[Path] | None, typer.Option(help="The interpreter of a side, with --live; give two.", metavar="BIN/python")
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(help="A module of your own, or one for each side, with --live.", metavar="FILE.py:FUNCTION"),
    ] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option("--input", help="An input of the modules, one for each.", metavar="[NAME=][TYPE:]SIZES"),
    ] = None,
    pairs: Annotated[int | None, typer.Option(help="So many pairs; by default 7, and 11 or 15 where needed.")] = None,
    min_effect: Annotated[str, typer.Option(help="The least change that counts.", metavar="0.5%")] = "0.5%",
    preset: Annotated[str, typer.Option(help="How long a process measures, with --live.")] = "quick",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto, with --live.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of the model, with --live.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file, for its limits, with --live.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the records, with --live.")] = Path("bench-out"),
    wait: _Wait = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether B is faster than A, slower or the same."""
    from benchd.daemon.commands import compare  # noqa: PLC0415
    from benchd.daemon.commands.arguments import quantity  # noqa: PLC0415
    from benchd.daemon.commands.once import own_module  # noqa: PLC0415
    from benchd.daemon.measuring.paired import Request  # noqa: PLC0415

    least = quantity("--min-effect", min_effect, {"%": 0.01})
    if not (live or aa):
        raise typer.Exit(compare.compare_files([Path(side) for side in sides], least, sys.stdout, json))
    request = Request(
        cases=sides,
        pythons=[str(path) for path in python or []],
        modules=[own_module(path, input_ or []) for path in module or []],
        pairs=pairs,
        min_effect=least,
        preset=preset,
        config=config,
        device=device,
        threads=threads,
        output=output,
        is_aa=aa,
        wait=_waits(wait),
    )
    raise typer.Exit(compare.compare_live(request, sys.stdout, json))


_baseline = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="The runs that later ones are held against.")
_benchd.add_typer(_baseline, name="baseline")


@_baseline.command("set", epilog="Example: benchd baseline set bench-out")
def baseline_set(
    runs: Annotated[list[Path], typer.Argument(help="Result files or folders: at least 3 runs of bench-once.")],
) -> None:
    """Store at least 3 runs as the baseline of this machine."""
    from benchd.daemon.commands.compare import set_baseline  # noqa: PLC0415

    raise typer.Exit(set_baseline(runs, sys.stdout))


@_baseline.command("show", epilog="Example: benchd baseline show --json")
def baseline_show(json: Annotated[bool, typer.Option("--json", help="Print the records.")] = False) -> None:
    """Print what the baseline holds."""
    from benchd.daemon.commands.compare import show_baseline  # noqa: PLC0415

    raise typer.Exit(show_baseline(sys.stdout, json))


@_baseline.command("clear", epilog="Example: benchd baseline clear")
def baseline_clear() -> None:
    """Forget the baseline."""
    from benchd.daemon.commands.compare import clear_baseline  # noqa: PLC0415

    raise typer.Exit(clear_baseline(sys.stdout))


@_benchd.command(epilog="Example: benchd recommend bench-out --max-latency 33ms --objective energy")
def recommend(
    files: Annotated[list[Path], typer.Argument(help="Result files or folders.")],
    max_latency: Annotated[str | None, typer.Option(help="p99, or the median's upper end.", metavar="33ms")] = None,
    max_power: Annotated[str | None, typer.Option(help="Mean power of the input.", metavar="10W")] = None,
    max_memory: Annotated[str | None, typer.Option(help="Peak memory.", metavar="2GiB")] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(help="Least share of images with float64's class, ties aside; without it 0.98.", metavar="0.995"),
    ] = None,
    max_accuracy_drop: Annotated[
        str | None, typer.Option(help="Upper end of the drop against plain fp32 on the same images.", metavar="1%")
    ] = None,
    objective: Annotated[str, typer.Option(help="latency, energy or throughput.")] = "latency",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which variant of each model to ship, and why no other."""
    from benchd.daemon.commands import compare  # noqa: PLC0415
    from benchd.daemon.commands.arguments import requirements  # noqa: PLC0415

    asked = requirements(max_latency, max_power, max_memory, min_agreement, objective, max_accuracy_drop)
    raise typer.Exit(compare.recommend(files, asked, sys.stdout, json))


@_benchd.command(epilog="Example: benchd report bench-out --format html,csv --output report")
def report(
    files: Annotated[list[Path], typer.Argument(help="Result files or folders.")],
    format_: Annotated[str, typer.Option("--format", help="html, md, csv, json, or several.", metavar="A,B")] = "html",
    output: Annotated[Path, typer.Option(help="Folder for report.html and the others.")] = Path("bench-out"),
) -> None:
    """Write records as a page with charts, as Markdown, CSV or JSON."""
    from benchd.daemon.commands.arguments import choices  # noqa: PLC0415
    from benchd.daemon.reporting import report as report_of  # noqa: PLC0415

    formats = choices("format", _names(format_), list(report_of.FORMATS))
    raise typer.Exit(report_of.report(files, formats, output, sys.stdout))


@_benchd.command(epilog="Example: benchd profile vim_tiny --workload eval --batch-size 4 --steps 3 --warmup 1")
def profile(
    model: Annotated[str | None, typer.Argument(help="A model of `benchd list`.", metavar="MODEL")] = None,
    variant: Annotated[str, typer.Option(help="The variant to profile.")] = "eager",
    method: Annotated[
        str | None,
        typer.Option(help="torch, memory, benchmark (these by default), layers, nsys, ncu, or all.", metavar="A,B"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer runs of each method.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="More of them.")] = False,
    steps: Annotated[int | None, typer.Option(help="Active steps.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps before them.")] = None,
    workload: Annotated[str, typer.Option(help="forward, eval (data, model, loss, item) or train.")] = "forward",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, GPU-UUID or auto.")] = "auto",
    weights: _Weights = None,
    data: _Data = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A model's option; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images a step; the model's own by default.")] = None,
    time_steps: Annotated[int | None, typer.Option(help="The option time_steps.")] = None,
    level: Annotated[int | None, typer.Option(help="The option level.")] = None,
    repeat_input: Annotated[bool, typer.Option("--repeat-input", help="The option encoding=repeat.")] = False,
    module: Annotated[
        str | None, typer.Option(help="A module of your own, by file or by package.", metavar="FILE.py:FUNCTION")
    ] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option("--input", help="An input of the module, one for each.", metavar="[NAME=][TYPE:]SIZES"),
    ] = None,
    kernel_regex: Annotated[str | None, typer.Option(help="Kernels that ncu counts.", metavar="REGEX")] = None,
    snn_kernels: Annotated[bool, typer.Option("--snn-kernels", help="ncu counts spiking neurons alone.")] = False,
    sort: Annotated[
        str | None, typer.Option(help="Operators by this column; by self time by default.", metavar="COLUMN")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="An empty or new folder; one under profiles/ by default.", metavar="DIR")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of tables.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Measure the variants that the findings propose.")] = False,
    mqtt: Annotated[str | None, typer.Option(help="Publish there.", metavar="mqtt://HOST[:PORT]")] = None,
    wait: _Wait = None,
) -> None:
    """Say where the time goes, by operator, kernel, module, layer and component, and what to do about it."""
    from benchd.daemon.measuring.plan import require_measure  # noqa: PLC0415

    require_measure()  # what reads a trace needs NumPy
    from benchd.daemon.commands import profile as profiling  # noqa: PLC0415
    from benchd.daemon.commands.arguments import choices, options  # noqa: PLC0415
    from benchd.daemon.profiling.profile import METHODS, WORKLOADS  # noqa: PLC0415

    aliases = {"time_steps": time_steps, "level": level, "encoding": "repeat" if repeat_input else None}
    given = [*(option or []), *(f"{name}={value}" for name, value in aliases.items() if value is not None)]
    request = profiling.Request(
        model=model,
        variant=variant,
        methods=choices("method", _names(method), [*METHODS, "all"]),
        presets=[name for name, asked in (("quick", quick), ("thorough", thorough)) if asked],
        steps=steps,
        warm_up=warmup,
        workload=choices("workload", [workload], WORKLOADS)[0],
        device=device,
        weights=weights,
        data=data,
        options=options(given),
        batch_size=batch_size,
        module=module,
        inputs=input_ or [],
        kernel_regex=kernel_regex,
        snn_kernels=snn_kernels,
        sort=sort,
        output=output,
        as_json=json,
        verify=verify,
        mqtt=mqtt,
        wait=_waits(wait),
    )
    raise typer.Exit(profiling.run(request, sys.stdout, sys.stderr))


@_benchd.command("list", epilog="Example: benchd list --json")
def list_(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile and list the Triton kernels; needs no GPU.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List models, options and variants, or the kernels for GPUs."""
    from benchd.daemon.reporting.console import print_catalog, print_kernels  # noqa: PLC0415

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
    folder: Annotated[
        Path, typer.Argument(help="The output folder of bench-once, or the state folder of the service.")
    ],
    mqtt: Annotated[str, typer.Option(help="Publish there.", metavar="mqtt://HOST[:PORT]")],
    timeout_s: Annotated[float, typer.Option(help="Give up after so many seconds.")] = 60.0,
    dead: Annotated[bool, typer.Option("--dead", help="Send what a broker has refused once more.")] = False,
) -> None:
    """Send the results of a folder that no broker has taken yet."""
    from benchd.daemon.commands.replay import replay as send  # noqa: PLC0415

    raise typer.Exit(send(folder, mqtt, timeout_s, sys.stdout, dead=dead))


@_benchd.command("run", epilog="Example: benchd run --config /etc/benchd/benchd.toml")
def run_(
    config: Annotated[Path, typer.Option(help="The TOML file of the service.")] = Path("/etc/benchd/benchd.toml"),
    artifacts: Annotated[
        Path | None, typer.Option(help="Exported files to use before any is made.", metavar="DIR")
    ] = None,
) -> None:
    """Run the service: measure what the configuration schedules, publish it, answer commands."""
    from benchd.daemon.service.service import run  # noqa: PLC0415

    raise typer.Exit(run(config, artifacts))


@_benchd.command(epilog="Example: benchd export vim_tiny --precision fp32,fp16 --batch-sizes 1,dynamic --out artifacts")
def export(
    models: Annotated[str | None, typer.Argument(help="Models, separated by commas.", metavar="[MODEL,...]")] = None,
    to: Annotated[str, typer.Option(help="onnx, or tensorrt on the GPU that will run it.")] = "onnx",
    precision: Annotated[str, typer.Option(help="fp32, fp16, or both.", metavar="A,B")] = "fp32",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes; `dynamic` for any.", metavar="1,4,dynamic")] = "1",
    form: Annotated[str, typer.Option(help="The scan's form: auto, scan or two_level.")] = "auto",
    option: Annotated[
        list[str] | None, typer.Option(help="A model's option and its values; may be repeated.", metavar="NAME=1,2")
    ] = None,
    weights: _Weights = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights.", min=0, max=2**62)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write there in place of the store.", metavar="FILE.onnx|DIR")
    ] = None,
    workspace: Annotated[str | None, typer.Option(help="What a TensorRT build may use.", metavar="1GiB")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show what the store holds.")] = False,
    prune: Annotated[str | None, typer.Option(help="Shrink the store to this size.", metavar="2GiB")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Export models to files and check each: valid, the same numbers, readable by TensorRT."""
    from benchd.daemon.commands import export as exporting  # noqa: PLC0415
    from benchd.daemon.commands.arguments import batches, byte_count, choices, options  # noqa: PLC0415
    from benchd.daemon.measuring.protocol import ExportRequest  # noqa: PLC0415
    from benchd.exporters import files  # noqa: PLC0415

    if list_:
        exporting.list_store(sys.stdout, json)
    elif prune is not None:
        exporting.prune_store(byte_count("--prune", prune), sys.stdout)
    else:
        request = ExportRequest(
            models=_names(models),
            to=choices("target", [to], exporting.TARGETS)[0],
            precisions=choices("precision", _names(precision), files.PRECISIONS),
            batches=batches("--batch-sizes", _names(batch_sizes)),
            form=None if form == "auto" else choices("form", [form], files.FORMS)[0],
            options=options(option or []),
            weights=weights,
            seed=seed,
            out=str(out) if out else None,
            workspace_bytes=byte_count("--workspace", workspace) if workspace else None,
        )
        raise typer.Exit(exporting.run(request, sys.stdout, json))


@_benchd.command(epilog="Example: benchd doctor --need nvml,tensorrt")
def doctor(
    need: Annotated[str | None, typer.Option(help="What must be usable, separated by commas.", metavar="A,B")] = None,
    unit: Annotated[
        bool, typer.Option("--unit", help="Say in its place what the installed unit keeps from the service.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say of each sensor and runtime whether it can be used here, or why not and what to do."""
    from benchd.daemon.commands import doctor as examination  # noqa: PLC0415

    if unit:
        raise typer.Exit(examination.run_unit(sys.stdout, Path("/"), json))
    raise typer.Exit(examination.run(sys.stdout, Path("/"), json, _names(need)))


@_benchd.command("power-sweep", epilog="Example: sudo benchd power-sweep --modes 15W,25W -- --models vim_tiny")
def power_sweep(
    modes: Annotated[str, typer.Option(help="Names from nvpmodel's file.", metavar="15W,25W,MAXN")],
    case: Annotated[list[str], typer.Argument(help="What bench-once is to measure.", metavar="-- OPTIONS")],
) -> None:
    """Measure the same cases in several power modes of a Jetson; the former mode comes back in every case."""
    from benchd.daemon.commands import power_sweep as sweep  # noqa: PLC0415

    raise typer.Exit(sweep.run(_names(modes), [str(sweep.BENCH_ONCE), *case], sys.stdout))


@_benchd.command(epilog="Example: benchd dashboard --mqtt mqtt://broker.local")
def dashboard(
    mqtt: Annotated[str, typer.Option(help="Listen there.", metavar="mqtt://HOST[:PORT]")],
    database: Annotated[
        str | None, typer.Option(help="sqlite:///PATH or postgresql://HOST/NAME; a file of its own by default.")
    ] = None,
    host: Annotated[str, typer.Option(help="Interface of the pages.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the pages.")] = 8420,
    collector: Annotated[
        str | None, typer.Option(help="Name of this collector, of its own in a fleet; the host's by default.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="collector or pages; both by default.")] = None,
    ca_file: _CaFile = None,
    certificate_file: _CertificateFile = None,
    key_file: _KeyFile = None,
) -> None:
    """Show a fleet live on web pages and keep its history."""
    from benchd.dashboard.start import start  # noqa: PLC0415

    start(_broker(mqtt, ca_file, certificate_file, key_file), database, host, port, collector, only)


@_benchd.command(epilog="Example: benchd demo --port 9000")
def demo(port: Annotated[int, typer.Option(help="Port of the pages.")] = 8420) -> None:
    """Show it all at once: a broker, this machine being measured, three simulated devices and the dashboard."""
    from benchd.dashboard.start import demonstrate  # noqa: PLC0415

    raise typer.Exit(demonstrate(port))


@_benchd.command(epilog="Example: benchd watch --mqtt mqtt://broker.local")
def watch(
    mqtt: Annotated[str | None, typer.Option(help="A fleet's broker.", metavar="mqtt://HOST[:PORT]")] = None,
    seconds: Annotated[float | None, typer.Option(help="End after so long; until Ctrl-C by default.")] = None,
    device: Annotated[str, typer.Option(help="Whose sensors, without a broker: cpu or cuda.")] = "cpu",
    ca_file: _CaFile = None,
    certificate_file: _CertificateFile = None,
    key_file: _KeyFile = None,
) -> None:
    """Show a fleet live in the terminal, or without a broker this machine's sensors."""
    from benchd.daemon.sampling import sources  # noqa: PLC0415

    if mqtt:
        from benchd.dashboard.start import show  # noqa: PLC0415

        show(_broker(mqtt, ca_file, certificate_file, key_file), seconds)
    else:
        from benchd.daemon.commands.watch import watch as show_sensors  # noqa: PLC0415

        show_sensors(sources.present(device), seconds, sys.stdout)


if __name__ == "__main__":
    benchd()

"""`benchd export`: requests exports and shows the results; a child process does the work, because it needs torch."""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar

import msgspec
import typer

from benchd.daemon.commands import application, arguments, options
from benchd.daemon.commands.options import OfferedField
from benchd.daemon.errors import UsageError, require_measure, unknown
from benchd.daemon.machine import folders, interpreter
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.protocol import CALIBRATION_IMAGES, ExportRequest, encoded, entry_of
from benchd.daemon.measuring.session import writable
from benchd.daemon.records import Inputs, UserFile
from benchd.daemon.reporting.console import console_on
from benchd.daemon.reporting.tables import figures, print_rows
from benchd.exporters import files
from benchd.exporters.artifacts import Artifact, ArtifactError, ArtifactStore
from benchd.models import catalog, demo

T = TypeVar("T")
To = Literal["onnx", "tensorrt"]
TARGETS: tuple[To, ...] = ("onnx", "tensorrt")

app = application()


@app.command(epilog="Example: benchd export vim_tiny --precision fp32,fp16 --batch-sizes 1,dynamic --output artifacts")
@options.of_suite(
    *(
        "calibration",
        "module",
        "nir",
        OfferedField("onnx", "Your own ONNX file, for int8."),
        "inputs",
        "options",
        "weights",
    ),
    OfferedField("seed", "Seed of random weights (default 0)."),
)
def export(
    given: dict[str, Any],
    models: Annotated[str | None, typer.Argument(help="Models, separated by commas.", metavar="[MODEL,...]")] = None,
    to: Annotated[
        str, typer.Option(help="What to write; build tensorrt on the GPU that will run it.", metavar="onnx|tensorrt")
    ] = "onnx",
    precision: Annotated[str, typer.Option(help="fp32, fp16, int8.", metavar="A,B")] = "fp32",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes; `dynamic` for any.", metavar="1,4,dynamic")] = "1",
    images: Annotated[int, typer.Option(help="Images to calibrate with.", min=1)] = CALIBRATION_IMAGES,
    quantised_for: Annotated[
        str,
        typer.Option(
            help="Target of int8 files: cpu (x86), avx2 (x86 without VNNI), arm or tensorrt.", metavar="TARGET"
        ),
    ] = "auto",
    form: Annotated[str, typer.Option(help="Form of the scan.", metavar="auto|scan|two_level")] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="Write here instead of to the store.", metavar="FILE.onnx|DIR")
    ] = None,
    workspace: arguments.Workspace = None,
    list_: Annotated[bool, typer.Option("--list", help="List the files in the store.")] = False,
    prune: Annotated[str | None, typer.Option(help="Shrink the store to this size.", metavar="2GiB")] = None,
    json: arguments.AsJson = False,
) -> None:
    """Export models to files and check each one.

    A file must be valid and numerically equal to its model.
    """
    if list_ and prune is not None:
        raise UsageError("--list and --prune: give only one of them")
    if list_:
        return list_store(sys.stdout, json)
    if prune is not None:
        if json:
            raise UsageError("--json and --prune: give only one of them; --prune does not list files")
        return prune_store(arguments.byte_count("--prune", prune), sys.stdout)
    own = arguments.own_model(given, {"MODEL": models})
    request = ExportRequest(
        models=arguments.names("--models", models),
        to=arguments.choices("target", [to], TARGETS)[0],
        precisions=arguments.choices("precision", arguments.names("--precision", precision), files.PRECISIONS),
        batches=arguments.batches("--batch-sizes", arguments.names("--batch-sizes", batch_sizes)),
        form=_unless_auto("form", form, files.FORMS),
        options=given.get("options", {}),
        inputs=Inputs(weights=given.get("weights"), calibration=given.get("calibration")),
        seed=given.get("seed", 0),
        out=str(output) if output else None,
        workspace_bytes=arguments.byte_count("--workspace", workspace) if workspace else None,
        calibration_images=images,
        quantised_for=_unless_auto("runtime", quantised_for, files.QUANTISED_FOR),
        own=own,
    )
    raise typer.Exit(run(request, sys.stdout, json))


def _unless_auto(kind: str, given: str, known: Sequence[T]) -> T | None:
    return None if given == "auto" else arguments.choices(kind, [given], known)[0]


def run(request: ExportRequest, out: TextIO, as_json: bool) -> int:
    """Export in a child, show the files and return its exit code; first raise UsageError if the request is invalid."""
    _refuse(request)
    require_measure()
    if request.out:  # checked before spending minutes on the export
        writable(Path(request.out).parent if request.single else Path(request.out), f"--output {request.out}")
    child = subprocess.run(
        interpreter.of_module("benchd.daemon.worker.exporting"),
        input=encoded(request),
        stdout=subprocess.PIPE,
        check=False,
    )
    artifacts = msgspec.json.decode(child.stdout or b"[]", type=list[Artifact], dec_hook=lambda kind, text: kind(text))
    show(artifacts, out, as_json)
    if artifacts and not as_json:
        out.write(f"in {request.out or request.folder}\n")
    if child.returncode < 0:
        sys.stderr.write(f"error: the export child was killed by signal {-child.returncode}\n")
    return child.returncode if child.returncode >= 0 else 1


def _refuse(request: ExportRequest) -> None:
    if request.own:
        _refuse_own(request)
        return
    if not request.models:
        raise UsageError("name a model, as in `benchd export vim_tiny`; `benchd list` shows them")
    for model in request.models:
        plan.refuse_unknown(model)
        known = catalog.entry(model).options
        for option in request.options:
            if option not in known:
                raise unknown(f"option of {model}", option, sorted(known))
    is_file = request.inputs.weights not in {None, demo.DEMO, demo.RANDOM}
    if is_file and (len(request.models) > 1 or not Path(str(request.inputs.weights)).is_file()):
        raise UsageError(f"--weights {request.inputs.weights}: expected {demo.DEMO}, or an existing file for one model")
    count = len(request.models) * len(request.precisions) * len(request.batches)
    count *= math.prod(map(len, request.options.values()))
    if request.single and (count > 1 or request.to == "tensorrt"):
        raise UsageError(f"--output {request.out}: engines, or several files, need a folder")


def _refuse_own(request: ExportRequest) -> None:
    entry = entry_of("", request.own)
    for option in request.options:
        if entry and option not in entry.options:
            raise unknown("option", option, sorted(entry.options))
    if (request.options and not entry) or request.inputs.weights == demo.DEMO or request.to == "tensorrt":
        raise UsageError("your own model can only be exported --to onnx, without --option or --weights demo")
    if isinstance(request.own, UserFile) and (request.own.precision == "int8" or request.precisions != ["int8"]):
        raise UsageError("--onnx takes a float file and needs --precision int8")


def list_store(out: TextIO, as_json: bool) -> None:
    """Print the contents of this machine's store."""
    store = ArtifactStore(folders.artifacts())
    artifacts = list(store.list())
    show(artifacts, out, as_json)
    if not as_json:
        total = sum(artifact.metadata.bytes for artifact in artifacts)
        out.write(
            f"{len(artifacts)} file{'s' * (len(artifacts) != 1)}, {total / 1e6:.1f} MB in {folders.artifacts()}\n"
        )


def prune_store(limit_bytes: int, out: TextIO) -> None:
    """Remove the least recently used files until the rest is within the limit in bytes."""
    try:
        store = ArtifactStore(folders.artifacts())
        removed = store.prune(limit_bytes)
    except ArtifactError as error:
        raise UsageError(str(error)) from error
    out.write("".join(f"removed {key}\n" for key in removed) or "nothing to remove\n")


def show(artifacts: Sequence[Artifact], out: TextIO, as_json: bool) -> None:
    """Print one row per file, or all as JSON."""
    if as_json:
        out.write(msgspec.json.encode(artifacts, enc_hook=str).decode() + "\n")
        return
    if artifacts:
        of_each = figures("nodes", "MB", "off by", "load s", "export s")
        columns = ["model", "precision", "batch", "scan", *of_each, "code", "torch", "", "key"]
        rows = list(map(_row, artifacts))
        if any(artifact.metadata.measured.get("quantised") for artifact in artifacts):
            columns.append("int8")
            rows = [
                [*row, _quantised(exported.metadata.measured)] for row, exported in zip(rows, artifacts, strict=True)
            ]
        print_rows(console_on(out), columns, rows)


def _row(artifact: Artifact) -> list[str]:
    metadata = artifact.metadata
    facts, measured = metadata.facts, metadata.measured
    parity = measured.get("parity")
    return [
        str(facts.get("model", "")),
        str(facts.get("precision", "")),
        str(facts.get("batch", "")),
        str(facts.get("form") or "-"),
        str(measured.get("nodes", "-")),
        f"{metadata.bytes / 1e6:.1f}",
        f"{parity['error_share']:.1e}" if parity else "-",
        _seconds(measured.get("load_s")),
        _seconds(measured.get("export_s")),
        str(facts.get("code_sha256", "-"))[:8],
        str(facts.get("versions", {}).get("torch", "-")),
        "kept" if artifact.reused else "made",
        artifact.key,
    ]


def _quantised(measured: dict[str, Any]) -> str:
    """Return how many products are in int8, and how many are not, with the reasons."""
    quantisation = measured.get("quantised")
    if quantisation is None:
        return "-"
    left = Counter(quantisation["left_fp32"].values())
    reasons = ", ".join(f"{reason}{f' ({count})' if count > 1 else ''}" for reason, count in left.items())
    total = len(quantisation["layers"]) + sum(left.values())
    return f"{len(quantisation['layers'])} of {total} products; fp32: {reasons}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

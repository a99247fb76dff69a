"""Races the variants of a model against each other and any installed peers: `make bench-models`.

All are loaded in one process with the same weights and checked like the variants of a record, and then they take turns.
Inputs and outputs stay on the device. Ratios are a contender's time divided by that of the first, eager.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.machine import folders
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.protocol import Job
from benchd.daemon.records import Case, Check, Direction, OptionValue, Variant, all_variants
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker import backends, workload
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.backends.cudagraph import capture
from benchd.daemon.worker.backends.eager import DTYPES, amp_dtype
from benchd.daemon.worker.check.checking import check_and_answers
from benchd.daemon.worker.steps import Training
from benchd.daemon.worker.workload import Workload
from benchd.models import catalog
from benchmarks import peer_models, rows
from benchmarks.peers import Missing
from benchmarks.rows import Entrant

# readers will want to compare a spiking net with the same net without spikes
BESIDE = {"snn_stbif_resnet18": ["qann_resnet18/eager"]}
# largest batch for several plain graphs in one race: each has its own memory pool, tens of gigabytes beyond this
GRAPH_IMAGES = 64
COMPILED = 32  # limit for one race: variants share their code, which torch stops compiling after a number of variants
Call = Callable[[], object]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class ModelTiming(rows.ContenderRow, frozen=True, kw_only=True):
    """One contender's result for one batch size; `is_peer` is set if it is not ours."""

    model: str
    options: dict[str, OptionValue]
    batch_size: int
    direction: Direction
    is_peer: bool


@app.command(epilog='Example: make bench-models ARGS="--model vim_tiny --batch-size 4 --variant custom"')
def main(
    model: Annotated[list[str] | None, typer.Option(help="A model; may be repeated. All by default.")] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="A variant, or MODEL/VARIANT of another model, beside eager; may be repeated. All that run."),
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="A batch size; may be repeated.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the model.", metavar="KEY=VALUE")] = None,
    direction: Annotated[Direction, typer.Option(help="inference or training.")] = "inference",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Time to race one model at one batch size.")] = 20.0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Race other people's builds too.")] = True,
    output: Annotated[Path | None, typer.Option(help="Append one JSON line a contender there.")] = None,
) -> None:
    """Race the variants of a model and any installed peers."""
    where = rows.open_device(device, threads)
    wrong: list[str] = []
    for name in model or list(plan.DEFAULT_MODELS):
        options = _options(name, option or [])
        for size in batch_size or [1]:
            case = Case(name, Variant("eager", "fp32"), size, options, direction)
            raced = _raced(_job(case, where), variant, peers, where, seconds, output)
            _print(raced)
            rows.write(raced, output)
            ours = [row for row in raced if not row.is_peer and row.median_ms is not None]
            wrong += [f"{name} {row.contender} batch {size}" for row in ours if not row.right]
    rows.end(wrong)


def _options(model: str, given: Sequence[str]) -> dict[str, OptionValue]:
    try:
        return catalog.entry(model).resolve(dict(text.split("=", 1) for text in given))
    except (UsageError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _job(case: Case, device: torch.device) -> Job:
    return Job(
        case=case,
        limits=msgspec.structs.replace(plan.PRESETS["quick"], build_deadline_s=rows.ENTRANT_S),
        device=device.type,
        cache=str(folders.cache()),
        artifacts=str(folders.artifacts()),
    )


def _raced(
    job: Job,
    wanted: Sequence[str] | None,
    with_peers: bool,
    device: torch.device,
    seconds: float,
    output: Path | None,
) -> list[ModelTiming]:
    """Load and check all contenders, writing each row as soon as it is known, then race those that can run.

    They are loaded outside inference mode, as in a worker: nothing derived from inference tensors would be kept.
    """
    names = _names(job, wanted, device)
    if any("compile" in name for name in names):  # otherwise skipped, because importing the compiler takes a second
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = COMPILED
    facts: dict[str, Any] = {
        "model": job.case.model,
        "options": job.options,
        "batch_size": job.case.batch_size,
        "direction": job.case.direction,
        "device": rows.device_name(device),
        "versions": rows.versions(),
    }
    ours = ((_ours(job, name, device), False) for name in names)
    others = ((peer, True) for peer in (_peers(job, device) if with_peers else ()))
    entrants: list[tuple[Entrant, bool]] = []
    for entrant, is_peer in itertools.chain(ours, others):
        entrants.append((entrant, is_peer))
        rows.write([ModelTiming(**facts, is_peer=is_peer, **rows.fields(entrant, None))], output)
    with torch.inference_mode(job.case.direction == "inference"):
        results = rows.run([entrant for entrant, _ in entrants], device, seconds)
    return [
        ModelTiming(**facts, is_peer=is_peer, **rows.fields(entrant, results.get(entrant.name)))
        for entrant, is_peer in entrants
    ]


def _names(job: Job, wanted: Sequence[str] | None, device: torch.device) -> list[str]:
    """Return eager, then the requested variants or all that may run here; raise BadParameter for an unknown name."""
    if wanted is None:
        able = (name for name in can_run(job.case, device.type) if not crowds(name, job.case.batch_size))
        wanted = [*able, *BESIDE.get(job.case.model, [])]
    for name in wanted:
        model, _, variant = name.rpartition("/")
        try:
            catalog.entry(model or job.case.model)
            Variant.parse(variant)
        except UsageError as error:
            raise typer.BadParameter(f"--variant {name}: {error}") from error
    return ["eager", *(name for name in wanted if name != "eager")]


def crowds(variant: str, batch_size: int) -> bool:
    """Return whether a variant leaves the others too little memory when all are loaded at once."""
    return variant.startswith("cudagraph") and batch_size > GRAPH_IMAGES


def can_run(case: Case, device: str) -> list[str]:
    """Return the variants of a case that may run here, as far as can be known without trying."""
    machine = plan.inspect(device)
    cases = (msgspec.structs.replace(case, variant=variant) for variant in all_variants())
    return [candidate.variant.name for candidate in cases if plan.why_not(candidate, machine) is None]


def _ours(job: Job, name: str, device: torch.device) -> Entrant:
    """Load a variant of this model, or MODEL/VARIANT of a different one, and check it."""
    model, _, variant = name.rpartition("/")
    try:
        if model and model != job.case.model:
            job = msgspec.structs.replace(job, options=catalog.entry(model).resolve({}))
        case = msgspec.structs.replace(job.case, model=model or job.case.model, variant=Variant.parse(variant))
        job = msgspec.structs.replace(job, case=case)
        with rows.limited():
            built = workload.build(job)
            backends.prepare(case.variant, built.source, device, case.batch_size)
            loaded = backends.load(case.variant, built.source, device, built.images[: case.batch_size])
            with torch.inference_mode():
                check = check_and_answers(built, loaded, job).check
        return Entrant(name, _call(built, loaded, job), _shown(check), check.passed)
    except (Unsupported, UsageError) as error:
        return Entrant(name, None, str(error), right=False)
    except Exception as error:  # a runtime may raise anything
        return rows.failed(name, error)


def _shown(check: Check) -> str:
    if check.rule == "outputs":
        return f"error {check.error_share:.1e}"
    flipped = "" if check.flipped_share is None else f"{check.flipped_share:.1e} flipped, "
    return f"{check.verdict}: {flipped}{check.argmax_disagreements} of {check.images} disagree"


def _call(built: Workload, loaded: LoadedModel, job: Job) -> Call:
    """Return a call that runs inference once, or the forward and backward passes of a training step."""
    images = _images(built, job).to(loaded.device, loaded.dtype)
    if job.case.direction == "inference":
        return lambda: loaded.run(images)
    if loaded.module is None or not catalog.trains(job.case.model, job.case.variant.name):
        raise Unsupported(catalog.TRAINING)
    return _training(loaded.module, images, job)


def _images(built: Workload, job: Job) -> Tensor:
    """Return one batch for a catalogued model, which takes a single tensor."""
    if not isinstance(built.images, Tensor):
        raise Unsupported(f"{job.case.model} reads several inputs; a race is of models that read images")
    return built.images[: job.case.batch_size]


def _training(module: nn.Module, images: Tensor, job: Job) -> Call:
    step = Training(module, images.device, [images], job.case.seed)
    return lambda: step(0)


def _peers(job: Job, device: torch.device) -> Iterator[Entrant]:
    """Yield each peer in float32 and, for inference, in its users' half precision: amp, and on a GPU also fp16."""
    halves: list[Precision] = ["amp", "fp16"] if device.type == "cuda" else ["amp"]
    precisions: list[Precision] = ["fp32", *(halves if job.case.direction == "inference" else [])]
    graphs = [False, True] if device.type == "cuda" and job.case.direction == "inference" else [False]
    for name, build in peer_models.PEERS.get(job.case.model, {}).items():
        for precision, captured in itertools.product(precisions, graphs):
            yield _peer(job, name, build, Variant("eager", precision), device, captured)
            gc.collect()


def _peer(
    job: Job, name: str, build: peer_models.Build, variant: Variant, device: torch.device, captured: bool
) -> Entrant:
    """Load a peer and check it; `captured` runs it as a CUDA graph, as its users would if launches dominated."""
    label = name if variant.precision == "fp32" else f"{name}, {variant.precision}"
    label += ", in a graph" if captured else ""
    job = msgspec.structs.replace(job, case=msgspec.structs.replace(job.case, variant=variant))
    try:
        with rows.limited():
            built, dtype = workload.build(job), DTYPES[variant.precision]
            peer = build(copy.deepcopy(built.plain).to(device, dtype)).eval()
            run = _autocast(peer, device) if variant.precision == "amp" else peer
            with torch.inference_mode():
                check = check_and_answers(built, LoadedModel(run, dtype, device, None), job).check
        images = _images(built, job).to(device, dtype)
        call = (lambda: run(images)) if job.case.direction == "inference" else _training(peer, images, job)
        if captured:
            graph, answer = capture(call)
            call = graph.replay
            call()
            torch.testing.assert_close(answer, run(images), rtol=1e-2, atol=1e-2)
        return Entrant(label, call, _shown(check), check.passed)
    except (Missing, Unsupported) as reason:
        return Entrant(label, None, str(reason), right=False)
    except Exception as raised:  # a peer may raise anything
        return rows.failed(label, raised)


def _autocast(module: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    def run(images: Tensor) -> Tensor:
        with torch.autocast(device.type, amp_dtype(device)):
            return module(images)

    return run


def _print(raced: Sequence[ModelTiming]) -> None:
    first = raced[0]
    title = f"{first.model} batch {first.batch_size} {first.direction} on {first.device}"
    table = Table(title=title, title_justify="left")
    for column in ("contender", "answer against float64"):
        table.add_column(column)
    for column in ("median ms", "its time over eager's [95 %]"):
        table.add_column(column, justify="right")
    for row in sorted(raced, key=rows.fastest_first):
        table.add_row(row.contender, row.verdict, *rows.cells(row))
    rows.console().print(table)


if __name__ == "__main__":
    rows.as_a_worker("benchmarks.models")
    app()

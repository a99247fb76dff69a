"""Everything that can be measured of this project on one machine, in stages: `make bench-gpu`, `make bench-cpu`.

    probes       the machine's rates and its fingerprint
    correctness  the kernels and the models against their equations, by the test suite
    kernels      each op at several batch sizes against torch, torch.compile and installed peers, on a GPU also
                 in CUDA graphs
    engines      on a GPU the engines of the races below, which find them in the store
    models       each model's variants against each other and against peers; on a GPU, without --variant, those of RACED
    records      each variant in a process of its own: energy, clocks, memory, check, floor
    repeats      eager at the largest batch size in five fresh processes: how far times and energies scatter
    profiles     where the time goes, in eager and in the custom variant

A stage is a list of parts, each a process with a time limit. One that fails costs its own rows and no others. What they
find lies in a folder of the machine: `machine.json`, `tests.json`, `kernels.jsonl`, `models.jsonl`, `records.jsonl`,
`profiles/`, and `campaign.jsonl` with what each part came to. `python -m benchmarks.performance` makes
docs/performance.md from the races.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal
from xml.etree import ElementTree

import msgspec
import typer

from benchd.daemon.measuring import plan
from benchd.daemon.records import Case, Direction
from benchd.models import catalog
from benchmarks import models, performance, rows
from benchmarks.commands import command
from benchmarks.ops import OPS

KERNEL_BATCHES = [1, 4, 64]
REPEATS = 5  # processes of the stage of this name
RACE_TIMES = 4  # a race of models has more to time
# what a user would ship on a GPU, and what each step towards it brings: all that run there do not fit the time
RACED = (
    "eager",
    "amp",
    "fp16",
    "compile-amp",
    "cudagraph-fp16",
    "custom",
    "custom-fp16",
    "custom-cudagraph-fp16",
    "tensorrt-fp16",
    "onnxruntime-fp16",
)
# as in `make test`
SEVERAL = ("--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadscope", "--no-loadscope-reorder")
Status = Literal["ok", "failed", "timeout", "no time left"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line asks for; `scratch` holds what is not kept, such as raw times and traces."""

    device: str
    folder: Path
    scratch: Path
    models: list[str]
    batch_sizes: list[int]
    kernel_batch_sizes: list[int]
    ops: list[str]
    variants: list[str]
    seconds: float
    peers: bool
    compiled: bool


@dataclass(frozen=True)
class Part:
    """One process of a stage, and how its command line is shown."""

    name: str
    command: list[str]
    shown: str


def _python(name: str, *arguments: str) -> Part:
    return Part(name, [sys.executable, "-m", *arguments], " ".join(("python", "-m", *arguments)))


def _ours(name: str, program: Literal["benchd", "bench-once"], *arguments: str) -> Part:
    return Part(name, command(program, *arguments), " ".join((program, *arguments)))


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a part came to; `said` is the end of what it printed where it did not succeed."""

    stage: str
    part: str
    status: Status
    seconds: float
    command: str
    said: str = ""


@app.command(epilog='Example: make bench-gpu ARGS="--stage kernels --op selective_scan --batch-size 64"')
def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")],
    stage: Annotated[list[str] | None, typer.Option(help="A stage; may be repeated. All by default.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model; may be repeated.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="A batch size; may be repeated.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="An op; may be repeated. All by default.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="A variant beside eager; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(help="Time to race one op or one model at one batch size.")] = 5.0,
    minutes: Annotated[float, typer.Option(help="Time of a stage; parts that do not fit are named.")] = 8.0,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Race other people's builds too.")] = True,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Race torch.compile of the ops.")] = True,
    output: Annotated[Path, typer.Option(help="Where the machine's folder goes.")] = Path("results"),
) -> None:
    """Run the stages one after another and print what they found."""
    for name in stage or []:
        if name not in STAGES:
            raise typer.BadParameter(f"unknown stage {name!r}; choose one of {', '.join(STAGES)}")
    folder = output / _slug(device)
    settings = Settings(
        device=device,
        folder=folder,
        scratch=Path("bench-out/campaign") / folder.name,
        models=model or list(plan.DEFAULT_MODELS),
        batch_sizes=batch_size or ([1, 4, 64, 256] if device == "cuda" else [1, 4]),
        kernel_batch_sizes=batch_size or KERNEL_BATCHES,
        ops=op or list(OPS),
        variants=variant or [],
        seconds=seconds,
        peers=peers,
        compiled=compiled,
    )
    done = [part for name in stage or STAGES for part in _run(name, settings, minutes * 60)]
    typer.echo(performance.page(folder))
    for each in done:
        if each.status != "ok":
            typer.echo(f"{each.status}: {each.stage} {each.part}, {each.command}\n  {each.said}")
    raise typer.Exit(int(any(each.status != "ok" for each in done)))


def _slug(device: str) -> str:
    """Return a folder's name for the device, as the probes would name it."""
    try:
        name = rows.device_name(rows.open_device(device, None))
    except (RuntimeError, AssertionError) as error:  # torch says so in either way
        raise typer.BadParameter(f"--device {device}: {error}") from error
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _run(stage: str, settings: Settings, seconds: float) -> Iterator[Done]:
    """Run the parts of a stage within its time, and keep what each came to."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    for part in STAGES[stage](settings):
        done = finished(stage, part, end)
        typer.echo(f"{done.status}: {stage} {part.name}, {done.seconds:.0f} s", err=True)
        with (settings.folder / "campaign.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(done) + b"\n")
        yield done
    keep(settings.scratch, settings.folder)


def finished(stage: str, part: Part, end: float) -> Done:
    """Run a part until `end` (monotonic seconds) at the longest and return what it came to."""
    start = time.monotonic()
    status: Status = "no time left"
    said = ""
    if start < end:
        try:
            done = subprocess.run(part.command, capture_output=True, text=True, check=False, timeout=end - start)
            status, said = ("ok", "") if done.returncode == 0 else ("failed", _end_of(done.stderr or done.stdout))
        except subprocess.TimeoutExpired as error:
            status, said = "timeout", _end_of(str(error.stderr or ""))
    return Done(
        stage=stage,
        part=part.name,
        status=status,
        seconds=time.monotonic() - start,
        command=part.shown,
        said=_without_paths(said),
    )


def _end_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-3:])[-600:]


def keep(scratch: Path, folder: Path) -> None:
    """Bring what the test suite counted, the records and the profiles from the scratch folder, once."""
    counted = {path.stem: _counts(path) for path in sorted(scratch.glob("*.xml"))}
    if counted:
        (folder / "tests.json").write_bytes(msgspec.json.format(msgspec.json.encode(counted)) + b"\n")
    for source in sorted(scratch.glob("*/records.jsonl")):
        with (folder / "records.jsonl").open("a") as file:
            file.write(_without_paths(source.read_text()))
        source.unlink()
    for source in sorted(scratch.glob("*/profile.json")):
        target = folder / "profiles" / f"{source.parent.name}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(_without_paths(source.read_text()))
        source.unlink()


def _without_paths(text: str) -> str:
    """Return the text with paths from here: lines to type name the interpreter and the folder of this machine."""
    return text.replace(sys.executable, "python").replace(f"{Path.cwd()}/", "")


def _counts(report: Path) -> dict[str, int]:
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))  # noqa: S314 - our own test run wrote it
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def _probes(settings: Settings) -> Iterator[Part]:
    output = str(settings.folder / "machine.json")
    yield _python("machine", "benchmarks.machine", "--device", settings.device, "--output", output)


def _correctness(settings: Settings) -> Iterator[Part]:
    for folder in ("tests/kernels", "tests/gpu" if settings.device == "cuda" else "tests/models"):
        report = settings.scratch / f"{Path(folder).name}.xml"
        several = SEVERAL if folder == "tests/kernels" and settings.device == "cuda" else ()
        how = ("-q", "-p", "no:cacheprovider", *several, f"--junitxml={report}")
        yield _python(folder, "pytest", *how, folder)


def _kernels(settings: Settings) -> Iterator[Part]:
    precisions, captures = (("fp32", "fp16"), (False, True)) if settings.device == "cuda" else (("fp32",), (False,))
    for op, precision, batch, captured in product(settings.ops, precisions, settings.kernel_batch_sizes, captures):
        what = ("--op", op, "--dtype", precision, "--batch-size", str(batch), "--device", settings.device)
        how = ["--seconds", str(settings.seconds), "--output", str(settings.folder / "kernels.jsonl")]
        how += [] if settings.compiled else ["--no-compile"]
        how += ["--graph"] if captured else []
        name = f"{op} {precision} batch {batch}" + (" in graphs" if captured else "")
        yield _python(name, "benchmarks.kernels", *what, *how)


def _workloads(settings: Settings) -> Iterator[tuple[str, int, Direction]]:
    """Yield what is raced and recorded: each model at each batch size, and its training at the last."""
    for model in settings.models:
        for batch in settings.batch_sizes:
            yield model, batch, "inference"
        yield model, settings.batch_sizes[-1], "training"


def _engines(settings: Settings) -> Iterator[Part]:
    for model, batch, direction in _workloads(settings):
        raced = settings.variants or _raced(model, batch, direction)
        precisions = [name.removeprefix("tensorrt-") for name in raced if name.startswith("tensorrt-")]
        precisions += ["fp32"] if "tensorrt" in raced else []
        if precisions and direction == "inference" and settings.device == "cuda":
            what = ("--precision", ",".join(precisions), "--batch-sizes", str(batch), "--weights", "random")
            yield _ours(f"{model} batch {batch}", "benchd", "export", model, "--to", "tensorrt", *what)


def _models(settings: Settings) -> Iterator[Part]:
    return (_race(*workload, settings) for workload in _workloads(settings))


def _race(model: str, batch: int, direction: Direction, settings: Settings) -> Part:
    what = ["--model", model, "--batch-size", str(batch), "--direction", direction, "--device", settings.device]
    variants = settings.variants or (_raced(model, batch, direction) if settings.device == "cuda" else [])
    what += [argument for variant in variants for argument in ("--variant", variant)]
    what += [] if settings.peers else ["--no-peers"]
    how = ("--seconds", str(RACE_TIMES * settings.seconds), "--output", str(settings.folder / "models.jsonl"))
    return _python(f"{model} batch {batch} {direction}", "benchmarks.models", *what, *how)


def _raced(model: str, batch: int, direction: Direction) -> list[str]:
    """Return what races on a GPU by default; who cannot run there is named in the race."""
    able = (name for name in RACED if direction == "inference" or catalog.trains(model, name))
    return [*(name for name in able if not models.crowds(name, batch)), *models.BESIDE.get(model, [])]


def _records(settings: Settings) -> Iterator[Part]:
    for model, batch, direction in _workloads(settings):
        able = models.can_run(Case(model=model, batch_size=batch, direction=direction), settings.device)
        names = ",".join(name for name in able if not settings.variants or name in ("eager", *settings.variants))
        scratch = settings.scratch / f"records-{model}-{batch}-{direction}"
        what = ("--models", model, "--variants", names, "--batch-sizes", str(batch), "--direction", direction)
        how = ("--device", settings.device, "--preset", "quick", "--output", str(scratch))
        if names:
            yield _ours(f"{model} batch {batch} {direction}", "bench-once", *what, *how)


def _repeats(settings: Settings) -> Iterator[Part]:
    for model in settings.models:
        what = ("--models", model, "--variants", "eager", "--batch-sizes", str(settings.batch_sizes[-1]))
        how = ("--device", settings.device, "--preset", "quick", "--processes", str(REPEATS))
        yield _ours(f"{model} eager", "bench-once", *what, *how, "--output", str(settings.scratch / f"repeats-{model}"))


def _profiles(settings: Settings) -> Iterator[Part]:
    for model, variant in product(settings.models, ("eager", "custom")):
        output = settings.scratch / f"{model}-{variant}"
        shutil.rmtree(output, ignore_errors=True)
        what = ("profile", model, "--variants", variant, "--method", "all", "--preset", "quick")
        yield _ours(f"{model} {variant}", "benchd", *what, "--device", settings.device, "--output", str(output))


STAGES: dict[str, Callable[[Settings], Iterator[Part]]] = {
    "probes": _probes,
    "correctness": _correctness,
    "kernels": _kernels,
    "engines": _engines,
    "models": _models,
    "records": _records,
    "repeats": _repeats,
    "profiles": _profiles,
}


if __name__ == "__main__":
    app()

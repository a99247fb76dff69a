"""Measures everything in this project that one machine can, most valuable first: `make bench-quarter`.

A rented GPU is available for a quarter of an hour, and may disappear at any moment. Stages therefore run one after
another under one deadline, each in a process group that is killed at its limit; a row is written to disk as soon as it
is known; and after each stage `results.tar` is replaced by one with everything so far. A second call skips the stages
that finished.

A machine's folder then contains `rows.jsonl` (the last result for each kernel, model, tiling and host time),
`machine.json`, `records.jsonl`, `predictions.md` and `stages.json`, with the outcome of each stage. `python -m
benchmarks.performance` makes docs/performance.md from the folders under results/.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import typer

from benchd.daemon.machine import interpreter
from benchd.daemon.machine.folders import write_through
from benchmarks import lines, predictions
from benchmarks.commands import command

Status = Literal["ok", "failed", "cut", "no time left"]
LARGEST_BYTES = 4 * 2**20  # largest file in the tar: only little can be copied from a remote machine
HAS_CUDA = "import sys, torch; sys.exit(not torch.cuda.is_available())"
UNPACKED = ("raw.jsonl", "results.tar", "results.tar.part")  # not in the tar; a kill may leave the last one behind
GRACE_S = 2.0  # time between SIGTERM and SIGKILL
GRAPH_OPS = (
    "selective_scan", "bidirectional_scan", "conv_scan_gate", "delta_projection", "causal_conv1d_pair", "add_rms_norm",
    "vim_in_conv", "vim_steps", "vim_out_norm", "lif", "lif_pool", "lif_pool_repeat", "stbif", "stbif_block",
    "max_pool_delta",
)  # fmt: skip
VIM = ("custom-fp16", "custom-cudagraph-fp16", "cudagraph-fp16", "compile-fp16")
SPIKING = ("custom-fp16", "custom-cudagraph", "custom-cudagraph-fp16", "cudagraph-fp16")
NETS = ("snn_onepass", "snn_stbif_resnet18")
# tilings of the scan: channels, tokens, warps, whether to read ahead
CUTS = ("2,8,1,1", "4,8,1,1", "8,8,1,1", "16,8,2,1", "64,2,2,0")
# the variants that a user would ship on a GPU, and those that show the gain of each step towards them
RACED = (
    "amp", "fp16", "compile-amp", "cudagraph-fp16", "custom", "custom-fp16", "custom-cudagraph-fp16", "tensorrt-fp16",
    "onnxruntime-fp16",
)  # fmt: skip
RECORDED = tuple(
    (model, variant)
    for model in ("vim_tiny", "snn_stbif_resnet18", "snn_onepass")
    for variant in ("custom-cudagraph-fp16", "eager")
)
BATCHES = ("--batch-size", "1", "--batch-size", "4", "--batch-size", "64")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class QuarterStage:
    """A command, the remaining seconds needed to make starting it worthwhile, and its time limit."""

    name: str
    least_s: float
    most_s: float
    command: Sequence[str]


@app.command(epilog='Example: make bench-quarter ARGS="--minutes 5 --stage graphs"')
def main(
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cpu or cuda.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="Time of all stages together.")] = 14.0,
    stage: Annotated[list[str] | None, typer.Option(help="A stage; may be repeated. All by default.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="As short as it can be: does every stage run here?")] = False,
    output: Annotated[Path, typer.Option(help="The folder of this machine's results.")] = Path("bench-out/quarter"),
) -> None:
    """Run the stages that have not finished yet, and print the predicted values next to the measured ones."""
    if device == "cuda" and subprocess.run([sys.executable, "-c", HAS_CUDA], check=False).returncode:
        raise typer.BadParameter("torch finds no CUDA device here; see what runs without one with --device cpu --dry")
    by_name = {planned.name: planned for planned in stages(device, output, dry=dry)}
    for name in stage or []:
        if name not in by_name:
            raise typer.BadParameter(f"unknown stage {name!r}; choose one of {', '.join(by_name)}")
    came_to = run([by_name[name] for name in by_name if not stage or name in stage], output, 60 * minutes)
    typer.echo((output / "predictions.md").read_text())
    raise typer.Exit(int(any(status == "failed" for status in came_to.values())))


def stages(device: str, output: Path, *, dry: bool = False) -> Iterator[QuarterStage]:
    """Yield the stages for a device, most important first; those that need a GPU are left out on a CPU."""
    on_gpu, raw = device == "cuda", str(output / "raw.jsonl")
    rows = ("--device", device, "--output", raw)
    batches = ("--batch-size", "1") if dry else BATCHES
    ops = [arg for op in (("add_rms_norm", "lif") if dry else GRAPH_OPS) for arg in ("--op", op)]
    few = [arg for op in ("add_rms_norm", "bidirectional_scan", "lif_pool", "stbif") for arg in ("--op", op)]
    seconds = "0.02" if dry else "0.4"
    fp16 = ("--dtype", "fp16") if on_gpu else ()
    captured = ("--graph",) if on_gpu else ()

    def ours(name: str, least: float, most: float, module: str, *arguments: str) -> QuarterStage:
        return QuarterStage(name, least, most, interpreter.of_module(f"benchmarks.{module}", *arguments))

    machine = ("--device", device, "--output", str(output / "machine.json"))
    yield ours("rates", 5, 25, "machine", *machine)
    smoke = (
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--one-each",
        "tests/kernels/test_launch_plan.py",
        "tests/kernels/lif",
    )
    more = () if dry else ("tests/kernels/selective_scan", "tests/kernels/add_rms_norm")
    yield QuarterStage("smoke", 15, 60, interpreter.of_module("pytest", *smoke, *more, "-k", "triton"))
    timed = (*fp16, *captured, "--seconds", seconds, *rows)
    yield ours("graphs", 20, 90, "kernels", *ops, *batches, "--no-compile", *timed)
    if not dry:
        yield ours("compiled", 20, 60, "kernels", *few, *batches[:2], *timed)
    if on_gpu:
        cuts = [arg for cut in CUTS for arg in ("--cut", cut)]
        yield ours("cuts", 10, 40, "kernels", "--op", "bidirectional_scan", *cuts, *batches, "--no-compile", *timed)
    for name, least, most, models, variants in (
        ("vim", 30, 100, ("vim_tiny",), VIM),
        ("spiking", 20, 55, NETS, SPIKING),
    ):
        chosen = variants if on_gpu else ("custom",)
        raced = [arg for model in models[: 1 if dry else None] for arg in ("--model", model)]
        raced += [arg for variant in chosen for arg in ("--variant", variant)]
        size = batches if name == "vim" else batches[-2:]
        yield ours(name, least, most, "models", *raced, *size, "--seconds", "0.1" if dry else "2", *rows)
    yield ours("host", 10, 35, "kernels", "--host", "--no-compile", *ops, "--batch-size", "1", *fp16, *rows)
    if on_gpu:
        yield from _counters(output)
    for model, variant in RECORDED if not dry else ():
        name = f"{model}-{variant}"
        selection = ("--models", model, "--variants", variant if on_gpu else "custom", "--batch-sizes", "1")
        how = ("--device", device, "--preset", "quick", "--output", str(output / name))
        yield QuarterStage(f"record {name}", 15, 60, command("bench-once", *selection, *how))
    if not dry:
        yield from _rest(device, output, rows)


def _rest(device: str, output: Path, rows: Sequence[str]) -> Iterator[QuarterStage]:
    """Yield the stages that take hours: all tests; races, records and profiles of every variant; five runs of eager."""
    tests = ("tests/kernels", "tests/gpu" if device == "cuda" else "tests/models")
    yield QuarterStage("tests", 300, 1800, interpreter.of_module("pytest", "-q", "-p", "no:cacheprovider", *tests))
    raced = [arg for variant in RACED for arg in ("--variant", variant)] if device == "cuda" else []
    for model, batch in product(("vim_tiny", *NETS), ("1", "4", "64", "256") if device == "cuda" else ("1", "4")):
        selection = ("--models", model, "--batch-sizes", batch, "--device", device, "--preset", "quick")
        if device == "cuda":
            engine = ("export", model, "--to", "tensorrt", "--precision", "fp16", "--batch-sizes", batch)
            yield QuarterStage(f"engine {model} b{batch}", 60, 600, command("benchd", *engine, "--weights", "random"))
        race = ("--model", model, "--batch-size", batch, *raced, "--seconds", "20", *rows)
        yield QuarterStage(f"race {model} b{batch}", 60, 480, interpreter.of_module("benchmarks.models", *race))
        record = command("bench-once", *selection, "--output", str(output / f"{model}-b{batch}"))
        yield QuarterStage(f"records {model} b{batch}", 60, 900, record)
    for model in ("vim_tiny", *NETS):
        how = ("--variants", "eager", "--device", device, "--preset", "quick")
        five = ("--models", model, *how, "--processes", "5", "--output", str(output / f"{model}-five"))
        yield QuarterStage(f"five of {model}", 60, 480, command("bench-once", *five))
        for variant in ("eager", "custom"):
            profile = ("profile", model, "--variants", variant, "--method", "all", "--preset", "quick")
            folder = ("--device", device, "--output", str(output / f"profile-{model}-{variant}"))
            yield QuarterStage(f"profile {model} {variant}", 30, 300, command("benchd", *profile, *folder))


def _counters(output: Path) -> Iterator[QuarterStage]:
    """Yield the stages that read the GPU's counters for both scans, at batch sizes 1 and 64, if ncu is permitted to."""
    for batch in ("1", "64"):
        ncu = ("ncu", "--set", "detailed", "--launch-skip", "6", "--launch-count", "3", "--csv", "--page", "raw")
        run = interpreter.of_module(
            "benchmarks.kernels", "--op", "bidirectional_scan", "--batch-size", batch, "--dtype", "fp16",
            "--device", "cuda", "--no-compile", "--seconds", "0.02",
        )  # fmt: skip
        yield QuarterStage(f"ncu b{batch}", 10, 30, (*ncu, "--log-file", str(output / f"ncu-b{batch}.csv"), *run))


def run(planned: Sequence[QuarterStage], output: Path, seconds: float) -> dict[str, Status]:
    """Run the stages that have not finished in `output`, within this many seconds; return the outcome of each.

    On SIGTERM the running stage is ended, its results are kept, and this process exits with status 143.
    """
    end = time.monotonic() + seconds
    output.mkdir(parents=True, exist_ok=True)
    state = output / "stages.json"
    came_to: dict[str, Status] = json.loads(state.read_text()) if state.exists() else {}
    signal.signal(signal.SIGTERM, _ended)
    for stage in planned:
        if came_to.get(stage.name) in {"ok", "failed", "cut"}:
            continue
        start = time.monotonic()
        try:
            came_to[stage.name] = finished(stage, output, end - start)
        except (SystemExit, KeyboardInterrupt):
            keep(output, came_to)
            raise
        keep(output, came_to)
        typer.echo(f"{came_to[stage.name]}: {stage.name}, {time.monotonic() - start:.0f} s", err=True)
    keep(output, came_to)
    return came_to


def _ended(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def finished(stage: QuarterStage, output: Path, left_s: float) -> Status:
    """Run a stage within its limit and the seconds that are left, writing its output to a file."""
    if left_s < stage.least_s:
        return "no time left"
    _end_line(output / "raw.jsonl")
    with (output / "said.txt").open("ab") as log:
        log.write(f"== {stage.name} ==\n".encode())
        log.flush()
        child = subprocess.Popen(
            stage.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(lines.HERE.parent)},
        )
        try:
            return "ok" if child.wait(min(stage.most_s, left_s)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "cut"
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a stage's process group, first with SIGTERM, then with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def _end_line(path: Path) -> None:
    """End an incomplete last line, which a kill may leave, so that the next row starts on a new one."""
    text = path.read_bytes() if path.exists() else b""
    if text and not text.endswith(b"\n"):
        lines.append(path, [b""])


def keep(output: Path, came_to: dict[str, Status]) -> None:
    """Write the results so far: the rows, the outcomes and the tar, each replaced completely or not at all."""
    with _undisturbed():
        rows = {lines.subject(row): (row, line) for row, line in lines.whole(output / "raw.jsonl")}
        _write(output / "rows.jsonl", [line for _, line in rows.values()])
        entries = (entry for path in sorted(output.glob("*/records.jsonl")) for entry in lines.whole(path))
        _write(output / "records.jsonl", list({record["run_id"]: line for record, line in entries}.values()))
        write_through(output / "predictions.md", predictions.page([row for row, _ in rows.values()]).encode())
        write_through(output / "stages.json", json.dumps(came_to, indent=1).encode())
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for path in sorted(output.glob("[!.]*.*")):
                if path.name not in UNPACKED and path.stat().st_size <= LARGEST_BYTES:
                    tar.add(path, path.name)
        write_through(output / "results.tar", packed.getvalue())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay SIGTERM and Ctrl-C until the block has finished writing."""
    waiting = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)


def _write(path: Path, rows: Sequence[bytes]) -> None:
    write_through(path, _without_paths(b"".join(row + b"\n" for row in rows)))


def _without_paths(text: bytes) -> bytes:
    """Return the text, with this machine's interpreter and folder removed from commands."""
    return text.replace(sys.executable.encode(), b"python").replace(f"{Path.cwd()}/".encode(), b"")


if __name__ == "__main__":
    app()

"""Races our kernels against their reference, torch, torch.compile and peers that are installed: `make bench-kernels`.

Every contender first computes the op's answer, which is compared with the equation's, then all are timed in turns in
one process. Ratios are times over ours: 8 means that ours is eight times faster.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchd.daemon.process import ALLOCATOR
from benchd.daemon.records import Probes
from benchd.daemon.worker import probes
from benchd.kernels.dispatch import Unavailable
from benchmarks.ops import FLIPS, OPS, TOLERANCES, Problem
from benchmarks.paired import Paired, race
from benchmarks.peers import Missing

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WRONG = 5
PLAIN_WIDTH = 160  # columns where no terminal says how wide it is
Call = Callable[[], Any]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Entrant:
    """A contender before the race: its call, or why there is none, and how its answer compares with the equation's."""

    name: str
    call: Call | None
    verdict: str
    right: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender at one shape, as it is printed and written. A ratio is its time over that of the first one.

    `x_of_floor` is its time over the longest of three: the tensors at the device's copy rate, the operations at its
    float32 matrix rate, the exponentials at its exponential rate; `bound_by` names that one.
    """

    op: str
    shape: list[int]
    dtype: str
    device: str
    contender: str
    verdict: str
    right: bool
    median_ms: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    rounds: int | None = None
    x_of_floor: float | None = None
    bound_by: str
    versions: Mapping[str, str]


@app.command()
def main(
    op: Annotated[list[str] | None, typer.Option(help="An op; may be repeated. All by default.")] = None,
    shape: Annotated[str | None, typer.Option(help="Its sizes; see --list.", metavar="4,197,384,16")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    implementation: Annotated[
        str | None,
        typer.Option(help="A kernel of your own, called with the op's arguments.", metavar="FILE.py:FUNCTION"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time to race one op at one shape.")] = 5.0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Race torch.compile of the loop.")] = True,
    output: Annotated[Path | None, typer.Option(help="Append one JSON line a contender there.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the ops with their shapes and stop.")] = False,
) -> None:
    """Race our kernels against their reference, torch and the peers that are installed."""
    if list_:
        _print_ops()
        return
    chosen = _chosen(op, shape, dtype, implementation)
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    own = _own(implementation) if implementation else None
    rates = probes.probe(where, "fp32")
    all_right = True
    for name, sizes in chosen:
        torch.manual_seed(0)
        problem = OPS[name].make(sizes, DTYPES[dtype], where)
        with torch.inference_mode():
            entrants = _entrants(problem, own, compiled, DTYPES[dtype])
            bound_by, floor_ms = _floor(problem, rates)
            facts = _facts(name, sizes, dtype, where) | {"bound_by": bound_by}
            rows = _raced(entrants, facts, floor_ms, where, seconds)
        _print(rows)
        _write(rows, output)
        all_right &= not any(_wrong(row) for row in rows)
    raise typer.Exit(0 if all_right else WRONG)


def _wrong(row: Row) -> bool:
    """Say whether our kernel answered wrongly, or the user's, which must also run."""
    return not row.right and (row.contender == "yours" or (row.contender == "benchd" and row.median_ms is not None))


def _chosen(
    ops: Sequence[str] | None, shape: str | None, dtype: str, implementation: str | None
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the ops with their shapes; raise BadParameter where the options do not fit."""
    for name in ops or []:
        if name not in OPS:
            raise typer.BadParameter(f"unknown op {name!r}; choose one of {', '.join(OPS)}")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if (shape or implementation) and len(ops or []) != 1:
        raise typer.BadParameter("--shape and --implementation need one --op")
    names = ops or list(OPS)
    if shape is None:
        return [(name, sizes) for name in names for sizes in OPS[name].shapes]
    sizes = tuple(int(size) if size.strip().isdecimal() else -1 for size in shape.split(","))
    letters = OPS[names[0]].letters
    if min(sizes) < 0 or (not letters.endswith("...") and len(sizes) != letters.count(",") + 1):
        raise typer.BadParameter(f"--shape {shape}: {names[0]} takes {letters}")
    return [(names[0], sizes)]


def _own(implementation: str) -> Callable[..., Any]:
    """Return the user's function; its file is run as code, so it comes from the command line alone."""
    path, _, function = implementation.rpartition(":")
    spec = importlib.util.spec_from_file_location("own_kernel", path)
    if not path or spec is None or spec.loader is None or not Path(path).is_file():
        raise typer.BadParameter(f"--implementation {implementation}: expected FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise typer.BadParameter(f"--implementation {implementation}: {path} has no function {function!r}")
    own: Callable[..., Any] = getattr(module, function)
    return own


def _entrants(problem: Problem, own: Callable[..., Any] | None, compiled: bool, dtype: torch.dtype) -> list[Entrant]:
    """Return everybody who may race, ours first, each with its answer judged."""
    prepared: dict[str, Callable[[], Call]] = {"benchd": lambda: problem.call("auto")}
    if own is not None:
        prepared["yours"] = lambda: lambda: own(**problem.arguments)
    prepared["torch"] = lambda: problem.call("torch")
    prepared["reference"] = lambda: problem.call("reference")
    if compiled:
        prepared["torch.compile of the reference"] = lambda: torch.compile(problem.call("reference"), dynamic=False)
    prepared |= {name: functools.partial(peer, problem.arguments) for name, peer in problem.peers.items()}
    expected = problem.expected()
    return [_judged(name, prepare, expected, problem, dtype) for name, prepare in prepared.items()]


def _judged(name: str, prepare: Callable[[], Call], expected: Any, problem: Problem, dtype: torch.dtype) -> Entrant:
    try:
        call = prepare()
        answer = call()
    except (Missing, Unavailable) as error:
        return Entrant(name, None, str(error), right=False)
    except Exception as error:  # whatever a peer or a user's kernel raises, the others race on
        return Entrant(name, None, f"failed: {type(error).__name__}: {str(error).splitlines()[0]}", right=False)
    right, verdict = _agreement(answer, expected, problem.exact, dtype)
    return Entrant(name, call, verdict, right)


def _agreement(answer: Any, expected: Any, exact: bool, dtype: torch.dtype) -> tuple[bool, str]:
    """Return whether the answer is right and by how much it differs, over every tensor of it."""
    answers, wanted = ((value if isinstance(value, tuple) else (value,)) for value in (answer, expected))
    if [tensor.shape for tensor in answers] != [tensor.shape for tensor in wanted]:
        return False, f"wrong shape {tuple(answers[0].shape)}"
    pairs = list(zip(answers, wanted, strict=True))
    if exact:
        flips = max(float((a.double() != b.double()).double().mean()) for a, b in pairs)
        return flips <= FLIPS, f"{flips:.1e} flipped" if flips else "bit-equal"
    error = max(_error(a.double(), b.double()) for a, b in pairs)
    return error <= TOLERANCES[dtype], f"error {error:.1e}"


def _error(answer: Tensor, expected: Tensor) -> float:
    worst = float((answer - expected).abs().max() / expected.abs().max())
    return worst if math.isfinite(worst) else math.inf


def _facts(op: str, shape: Sequence[int], dtype: str, device: torch.device) -> dict[str, Any]:
    return {"op": op, "shape": list(shape), "dtype": dtype, "device": _device_name(device), "versions": _versions()}


def _floor(problem: Problem, rates: Probes) -> tuple[str, float]:
    """Return what the op is bound by at the least, and the milliseconds that takes."""
    times_ms = {
        "bytes": 1e3 * problem.least_bytes(problem.call("torch")()) / rates.copy_bytes_per_s,
        "operations": 1e3 * problem.flops / rates.matrix_flops_per_s,
        "exponentials": 1e3 * problem.exponentials / rates.exponentials_per_s,
    }
    return max(times_ms.items(), key=lambda named: named[1])


def _raced(
    entrants: Sequence[Entrant], facts: Mapping[str, Any], floor_ms: float, device: torch.device, seconds: float
) -> list[Row]:
    starters = [(entrant.name, entrant.call) for entrant in entrants if entrant.call]
    results = {result.name: result for result in race(starters, device, seconds)} if starters else {}
    return [
        Row(
            **facts,
            contender=entrant.name,
            verdict=entrant.verdict if entrant.right or not entrant.call else f"WRONG: {entrant.verdict}",
            right=entrant.right,
            **_timed(results.get(entrant.name), floor_ms),
        )
        for entrant in entrants
    ]


def _timed(result: Paired | None, floor_ms: float) -> dict[str, Any]:
    if result is None:
        return {}
    low, high = (result.interval.low, result.interval.high) if result.interval else (None, None)
    times = {"median_ms": result.median_ms, "ratio": result.ratio, "rounds": result.rounds}
    return times | {"ratio_low": low, "ratio_high": high, "x_of_floor": result.median_ms / floor_ms}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    packages = ("benchd", "triton", "onnxruntime", "mamba-ssm", "causal-conv1d", "spikingjelly")
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    return {"torch": str(torch.__version__)} | {name: installed[name] for name in packages if name in installed}


def _print(rows: Sequence[Row]) -> None:
    first = rows[0]
    table = Table(title=f"{first.op} {tuple(first.shape)} {first.dtype} on {first.device}", title_justify="left")
    for column in ("contender", "answer"):
        table.add_column(column)
    for column in ("median ms", "its time over ours [95 %]", f"x of floor ({first.bound_by})"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.contender, row.verdict, *_cells(row))
    _console().print(table)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def _cells(row: Row) -> tuple[str, str, str]:
    if row.median_ms is None or row.ratio is None:
        return "-", "-", "-"
    reach = f" [{row.ratio_low:.3g}, {row.ratio_high:.3g}]" if row.ratio_low and row.ratio_high else ""
    return f"{row.median_ms:.4g}", f"{row.ratio:.3g}{reach}", f"{row.x_of_floor:.3g}"


def _write(rows: Sequence[Row], output: Path | None) -> None:
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")


def _print_ops() -> None:
    table = Table()
    for column in ("op", "sizes", "default shapes"):
        table.add_column(column)
    for name, op in OPS.items():
        table.add_row(name, op.letters, "; ".join(",".join(map(str, sizes)) for sizes in op.shapes))
    _console().print(table)


def _with_kept_heap() -> None:
    """Start again with the heap settings of a worker: they are read before the first allocation."""
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        again = [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | ALLOCATOR)  # noqa: S606 - no shell is what we want


if __name__ == "__main__":
    _with_kept_heap()
    app()

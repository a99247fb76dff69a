"""Races our kernels against torch, torch.compile and any installed peers: `make bench-kernels`.

Every contender first computes the op's answer, which is compared with the equation's; then all are timed alternately in
one process. Ratios are a contender's time divided by ours: 8 means that ours is eight times as fast.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import Probes
from benchd.daemon.worker import probes
from benchd.daemon.worker.backends.cudagraph import Slot, capture
from benchd.daemon.worker.steps import wait_for
from benchd.kernels.dispatch import Unavailable
from benchd.kernels.selective_scan.ops import bidirectional_op
from benchmarks import rows
from benchmarks.ops import FLIPS, OPS, TOLERANCES, Problem
from benchmarks.paired import VISIT_S, DroppedContender, PairedTiming, visit
from benchmarks.peers import Missing
from benchmarks.rows import Entrant

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_CALLS = 10  # calls per graph: launching a graph costs a few microseconds, which its calls share
HOST_ROUNDS, HOST_CALLS = 15, 50
# marks memory that no kernel has written: never the whole of a correct answer, and exact in every dtype
NOT_COMPUTED = 77.0
Call = Callable[[], Any]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class OpTiming(rows.ContenderRow, frozen=True, kw_only=True):
    """One contender's result for one shape.

    `x_of_floor` is its time divided by the longest of three: that of the tensors at the device's copy rate, of the
    operations at its float32 matrix rate, and of the exponentials at its exponential rate; `bound_by` names the
    longest. `captured` is set if the calls were replayed from CUDA graphs, `host` if the time is the host's part of a
    call.
    """

    op: str
    shape: list[int]
    dtype: str
    x_of_floor: float | None = None
    bound_by: str
    captured: bool = False
    host: bool = False


@app.command()
def main(
    op: Annotated[list[str] | None, typer.Option(help="An op; may be repeated. All by default.")] = None,
    shape: Annotated[str | None, typer.Option(help="Its sizes; see --list.", metavar="4,197,384,16")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="In place of the usual shapes; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    implementation: Annotated[
        str | None,
        typer.Option(help="A kernel of your own, called with the op's arguments.", metavar="FILE.py:FUNCTION"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time to race one op at one shape.")] = 5.0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Race torch.compile of the op.")] = True,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph/--no-graph", help="Race each call as a CUDA graph: the GPU's time without the host's. CUDA only."
        ),
    ] = False,
    host: Annotated[bool, typer.Option("--host", help="Time what a call costs the host instead of racing.")] = False,
    cut: Annotated[
        list[str] | None,
        typer.Option(
            help="Race the scan's launches in this cut too; with --graph.", metavar="CHANNELS,TOKENS,WARPS,AHEAD"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Append one JSON line a contender there.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the ops with their shapes and stop.")] = False,
) -> None:
    """Race our kernels against torch and any installed peers."""
    if list_:
        _print_ops()
        return
    chosen = _chosen(op, shape, batch_size, dtype, implementation)
    where = rows.open_device(device, threads)
    if graph and where.type != "cuda":
        raise typer.BadParameter("--graph needs a CUDA device, and this race is on the CPU")
    if cut and not (graph and op == ["bidirectional_scan"]):
        raise typer.BadParameter("--cut needs --graph and --op bidirectional_scan, whose launches it cuts")
    own = _own(implementation) if implementation else None
    cuts = [tuple(map(int, text.split(","))) for text in cut or []]
    rates = probes.probe(where, "fp32")
    wrong: list[str] = []
    for name, sizes in chosen:
        torch.manual_seed(0)
        problem = OPS[name].make(sizes, DTYPES[dtype], where)
        # a graph is captured outside inference mode: peers change their state, and torch.compile would compile again
        with torch.no_grad() if graph else torch.inference_mode():
            bound_by, floor_ms = _floor(problem, rates)
            facts = _facts(name, sizes, dtype, where) | {"bound_by": bound_by, "captured": graph, "host": host}
            entrants = []
            for entrant in _entrants(problem, own, compiled, graph, DTYPES[dtype], cuts):
                entrants.append(entrant)
                rows.write([_row(entrant, facts, None, floor_ms)], output)
            results = _on_host(entrants, where) if host else rows.run(entrants, where, seconds)
            raced = [_row(entrant, facts, results.get(entrant.name), floor_ms) for entrant in entrants]
        del entrant, entrants  # their graphs' memory is needed by the next op
        _print(raced)
        rows.write(raced, output)
        wrong += [f"{row.contender} of {name}" for row in raced if _wrong(row)]
    rows.end(wrong)


def _wrong(row: OpTiming) -> bool:
    """Return whether our kernel ran with a wrong answer, or the user's did not give the right one."""
    return not row.right and (row.contender == "yours" or (row.contender == "benchd" and row.median_ms is not None))


def _chosen(
    ops: Sequence[str] | None,
    shape: str | None,
    batches: Sequence[int] | None,
    dtype: str,
    implementation: str | None,
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the chosen ops with their shapes; raise BadParameter if the options do not fit together."""
    for name in ops or []:
        if name not in OPS:
            raise typer.BadParameter(f"unknown op {name!r}; choose one of {', '.join(OPS)}")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if (shape or implementation) and len(ops or []) != 1:
        raise typer.BadParameter("--shape and --implementation need one --op")
    names = ops or list(OPS)
    if shape and batches:
        raise typer.BadParameter("--shape holds the batch size already")
    if batches:
        return [(name, OPS[name].at(batch)) for name in names for batch in batches]
    if shape is None:
        return [(name, sizes) for name in names for sizes in OPS[name].shapes]
    sizes = tuple(int(size) if size.strip().isdecimal() else -1 for size in shape.split(","))
    letters = OPS[names[0]].letters
    if min(sizes) < 0 or (not letters.endswith("...") and len(sizes) != letters.count(",") + 1):
        raise typer.BadParameter(f"--shape {shape}: {names[0]} takes {letters}")
    return [(names[0], sizes)]


def _own(implementation: str) -> Callable[..., Any]:
    """Return the user's function; because its file is run as code, it is only accepted from the command line."""
    path, _, function = implementation.rpartition(":")
    spec = importlib.util.spec_from_file_location("own_kernel", path)
    if not path or spec is None or spec.loader is None or not Path(path).is_file():
        raise typer.BadParameter(f"--implementation {implementation}: expected FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise typer.BadParameter(f"--implementation {implementation}: {path} has no function {function!r}")
    return getattr(module, function)


def _on_host(entrants: Sequence[Entrant], device: torch.device) -> dict[str, PairedTiming | DroppedContender]:
    """Return how long a call of each contender takes to return, timing as many as fit in the GPU's queue."""
    results: dict[str, PairedTiming | DroppedContender] = {}
    for name, call in ((entrant.name, entrant.call) for entrant in entrants if entrant.call):
        spent = []
        for _ in range(HOST_ROUNDS):
            wait_for(device)
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            spent.append((time.perf_counter() - start) / HOST_CALLS)
        results[name] = PairedTiming(name, 1e3 * statistics.median(spent), None, None, HOST_ROUNDS)
    return results


def _in_cut(problem: Problem, cut: tuple[int, ...]) -> Call:
    """Return a call of the op with this tiling, for a graph; it neither uses nor leaves plans made with another."""
    from benchd.kernels.selective_scan import triton_impl  # noqa: PLC0415 - on a GPU only

    call, shipped = problem.call("triton"), triton_impl._cut
    channels, tokens, warps, ahead = cut
    chosen = triton_impl._Cut(channels, tokens, warps, bool(ahead))

    def run() -> Any:
        triton_impl._cut = lambda *_: chosen
        bidirectional_op._plans.clear()
        try:
            return call()
        finally:
            triton_impl._cut = shipped
            bidirectional_op._plans.clear()

    return run


def _entrants(
    problem: Problem, own: Callable[..., Any] | None, compiled: bool, graph: bool, dtype: torch.dtype,
    cuts: Sequence[tuple[int, ...]],
) -> Iterator[Entrant]:  # fmt: skip
    """Yield all contenders, ours first, each with a verdict on its answer."""
    prepared: dict[str, Callable[[], Call]] = {"benchd": lambda: problem.call("auto")}
    if own is not None:
        prepared["yours"] = lambda: lambda: own(**problem.arguments)
    prepared["torch"] = lambda: problem.call("torch")
    if compiled:
        prepared["torch.compile"] = lambda: compiled_call(problem.call("torch"))
    prepared |= {name: functools.partial(peer, problem.arguments) for name, peer in problem.peers.items()}
    prepared |= {f"cut {','.join(map(str, cut))}": functools.partial(_in_cut, problem, cut) for cut in cuts}
    expected = problem.expected()
    return (_judged(name, prepare, expected, problem, graph, dtype) for name, prepare in prepared.items())


def compiled_call(call: Call, backend: str = "inductor") -> Call:
    """Return `call` compiled, after a reset: torch compiles code, which all calls share, at most eight times."""
    torch._dynamo.reset()
    return torch.compile(call, dynamic=False, backend=backend)


def _judged(
    name: str, prepare: Callable[[], Call], expected: Any, problem: Problem, graph: bool, dtype: torch.dtype
) -> Entrant:
    calls = 1
    try:
        with rows.limited():
            call = prepare()
            answers = [call()]
            if graph:
                call, calls = _captured(call)
                answers.append(call())
    except (Missing, Unavailable, Unsupported) as error:
        return Entrant(name, None, str(error), right=False)
    except Exception as error:  # a peer or a user's kernel may raise anything
        return rows.failed(name, error)
    verdicts = [_agreement(answer, expected, problem.exact, dtype) for answer in answers]
    right, verdict = min(verdicts, key=operator.itemgetter(0))
    return Entrant(name, call, verdict, right, calls)


def _captured(call: Call) -> tuple[Call, int]:
    """Return a CUDA graph of several calls, whose replay returns the last call's answer, and the number of calls.

    A slow call is repeated less often, because its many launches would make the graph large.
    """
    calls = min(MOST_CALLS, math.ceil(VISIT_S / visit(call, 1, torch.device("cuda"))))

    def run() -> Any:
        for _ in range(calls - 1):
            call()
        return call()

    graph, answer = capture(run)
    for tensor in _tensors(answer):
        tensor.fill_(NOT_COMPUTED)  # a launch on a different stream ran immediately and is missing from the graph
    return Slot((), graph.replay, answer, call), calls


def _tensors(answer: Any) -> tuple[Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


def _agreement(answer: Any, expected: Any, exact: bool, dtype: torch.dtype) -> tuple[bool, str]:
    """Return whether the answer is right, and its largest deviation, considering all its tensors."""
    answers, wanted = _tensors(answer), _tensors(expected)
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
    where = {"device": rows.device_name(device), "versions": rows.versions()}
    return {"op": op, "shape": list(shape), "dtype": dtype} | where


def _floor(problem: Problem, rates: Probes) -> tuple[str, float]:
    """Return which resource bounds the op's time from below, and that bound in milliseconds."""
    times_ms = {
        "bytes": 1e3 * problem.least_bytes(problem.call("torch")()) / rates.copy_bytes_per_s,
        "operations": 1e3 * problem.flops / rates.matrix_flops_per_s,
        "exponentials": 1e3 * problem.exponentials / rates.exponentials_per_s,
    }
    return max(times_ms.items(), key=lambda named: named[1])


def _row(
    entrant: Entrant, facts: Mapping[str, Any], result: PairedTiming | DroppedContender | None, floor_ms: float
) -> OpTiming:
    x_of_floor = result.median_ms / floor_ms if isinstance(result, PairedTiming) else None
    return OpTiming(**facts, **rows.fields(entrant, result), x_of_floor=x_of_floor)


def _print(raced: Sequence[OpTiming]) -> None:
    first = raced[0]
    how = ", in CUDA graphs" if first.captured else ""
    table = Table(title=f"{first.op} {tuple(first.shape)} {first.dtype} on {first.device}{how}", title_justify="left")
    for column in ("contender", "answer"):
        table.add_column(column)
    for column in ("median ms", "its time over ours [95 %]", f"x of floor ({first.bound_by})"):
        table.add_column(column, justify="right")
    for row in raced:
        floor = "-" if row.x_of_floor is None else f"{row.x_of_floor:.3g}"
        table.add_row(row.contender, row.verdict, *rows.cells(row), floor)
    rows.console().print(table)


def _print_ops() -> None:
    table = Table()
    for column in ("op", "sizes", "default shapes"):
        table.add_column(column)
    for name, op in OPS.items():
        table.add_row(name, op.letters, "; ".join(",".join(map(str, sizes)) for sizes in op.shapes))
    rows.console().print(table)


if __name__ == "__main__":
    rows.as_a_worker("benchmarks.kernels")
    app()

"""Races how the launches of the scan are cut, in CUDA graphs: those that ship beside those that may be better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchd.kernels.selective_scan.ops import bidirectional_op
from benchmarks import kernels, rows
from benchmarks.ops import OPS
from benchmarks.rows import Entrant

OP = "bidirectional_scan"
# channels and tokens of a program, its warps, and whether it reads a group ahead
CUTS = ((2, 8, 1, True), (4, 8, 1, True), (8, 8, 1, True), (16, 8, 2, True), (32, 4, 1, False), (64, 2, 2, False))

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Row(kernels.Row, frozen=True, kw_only=True):
    """One cut of one shape; the contender is named after it."""

    cut: list[int]


@app.command()
def main(
    batch_size: Annotated[list[int], typer.Option(help="A batch size; may be repeated.")],
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Time to race the cuts at one batch size.")] = 2.0,
    output: Annotated[Path | None, typer.Option(help="Append one JSON line a cut there.")] = None,
) -> None:
    """Race the cuts of `bidirectional_scan` in float16."""
    where = rows.open_device(device, 1)
    if where.type != "cuda":
        typer.echo("a cut is one of Triton's launches, which need a GPU", err=True)
        raise typer.Exit
    facts: dict[str, Any] = {"op": OP, "dtype": "fp16", "device": rows.device_name(where), "versions": rows.versions()}
    for batch in batch_size:
        shape = OPS[OP].at(batch)
        problem = OPS[OP].make(shape, torch.float16, where)
        with torch.no_grad():
            expected = problem.expected()
            entrants = [_entrant(cut, problem.call("triton"), expected) for cut in CUTS]
            results = rows.run(entrants, where, seconds)
        for cut, entrant in zip(CUTS, entrants, strict=True):
            found = rows.fields(entrant, results.get(entrant.name))
            row = Row(**facts, **found, shape=list(shape), cut=list(cut), bound_by="-", captured=True)
            rows.write([row], output)
            typer.echo(f"batch {batch}, {row.contender}: {row.median_ms} ms, {row.verdict}")


def _entrant(cut: tuple[Any, ...], call: Callable[[], Any], expected: Any) -> Entrant:
    """Return the op with this cut as a graph, which no plan of another cut may have made."""
    from benchd.kernels.selective_scan import triton_impl  # noqa: PLC0415 - on a GPU only

    name = f"cut {cut[0]} x {cut[1]}, {cut[2]} warps"
    shipped = triton_impl._cut
    triton_impl._cut = lambda *_: triton_impl._Cut(*cut)
    bidirectional_op._plans.clear()
    try:
        with rows.limited():
            captured, calls = kernels.captured(call)
            right, verdict = kernels.agreement(captured(), expected, False, torch.float16)
        return Entrant(name, captured, verdict, right, calls)
    except Exception as error:  # whatever a compiler raises
        return rows.failed(name, error)
    finally:
        triton_impl._cut = shipped
        bidirectional_op._plans.clear()


if __name__ == "__main__":
    rows.as_a_worker("benchmarks.cuts")
    app()

"""What a call of each op costs the host: many in a row without waiting for the device, with the launches of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchd.daemon.worker.steps import wait_for
from benchd.kernels.dispatch import Unavailable
from benchmarks import rows
from benchmarks.kernels import DTYPES, Row
from benchmarks.ops import OPS

CALLS = 50  # a queue of a GPU takes a thousand launches before the host waits for it
REPEATS = 30

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    op: Annotated[list[str] | None, typer.Option(help="An op; may be repeated. All by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Append one JSON line an op there.")] = None,
) -> None:
    """Time the host's part of each op at its smallest shape."""
    where = rows.open_device(device, 1)
    dtype = "fp16" if where.type == "cuda" else "fp32"
    for name in op or list(OPS):
        shape = OPS[name].at(1)
        torch.manual_seed(0)
        try:
            call = OPS[name].make(shape, DTYPES[dtype], where).call("auto")
            with torch.inference_mode():
                spent_ms = 1e3 * host_s(call, where)
        except (Unavailable, RuntimeError) as error:
            typer.echo(f"{name}: {error}", err=True)
            continue
        facts: dict[str, Any] = {"device": rows.device_name(where), "versions": rows.versions(), "bound_by": "host"}
        row = Row(
            op=name, shape=list(shape), dtype=dtype, contender="benchd, host", verdict="not judged", right=False,
            median_ms=spent_ms, **facts,
        )  # fmt: skip
        rows.write([row], output)
        typer.echo(f"{name}: {1e3 * spent_ms:.1f} us")


def host_s(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call until it returns; the device has room for all of them."""
    call()
    spent = []
    for _ in range(REPEATS):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        spent.append((time.perf_counter() - start) / CALLS)
    return statistics.median(spent)


if __name__ == "__main__":
    rows.as_a_worker("benchmarks.host")
    app()

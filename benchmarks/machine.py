"""Describes the machine of a campaign: its fingerprint, its rates by precision and the cost of a launch."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from benchd.daemon.machine import environment
from benchd.daemon.records import Environment, Probes
from benchd.daemon.runtimes import Precision
from benchd.daemon.worker import probes
from benchmarks import rows

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
LAUNCHES = 1000
REPEATS = 20

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class BenchmarkMachine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine; `launch_us` is the time of an operator on one number, issued and run among many in a row."""

    device: str
    environment: Environment
    probes: dict[str, Probes]
    launch_us: float
    versions: dict[str, str]


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="The JSON file to write.")],
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Probe this machine and write the result."""
    where = rows.open_device(device, threads)
    machine = BenchmarkMachine(
        device=rows.device_name(where),
        environment=environment.describe(where.type, threads),
        probes={precision: probes.probe(where, precision) for precision in PRECISIONS},
        launch_us=launch_us(where),
        versions=rows.versions(),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(machine), indent=1) + b"\n")
    typer.echo(f"{machine.device}: a launch takes {machine.launch_us:.2f} us")
    for precision, its in machine.probes.items():
        typer.echo(
            f"{precision}: copies {its.copy_bytes_per_s / 1e9:.1f} GB/s, products {its.matrix_flops_per_s / 1e9:.0f} "
            f"GFLOP/s ({its.matrix_dtype}), exponentials {its.exponentials_per_s / 1e9:.2f} G/s ({its.exponentials_by})"
        )


def launch_us(device: torch.device) -> float:
    """Return the median time of one small operator among many, in microseconds."""
    number = torch.zeros(1, device=device)
    return statistics.median(_launches_s(number, device) for _ in range(REPEATS)) / LAUNCHES * 1e6


def _launches_s(number: torch.Tensor, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        number.add_(1.0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    app()

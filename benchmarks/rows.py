"""The parts that both races share: a contender's columns, their output, and an environment like a worker's."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import typer
from rich.console import Console

from benchd.daemon.machine import folders
from benchd.daemon.measuring.process import environment
from benchd.exporters import code
from benchmarks import lines
from benchmarks.paired import DroppedContender, PairedTiming, in_a_line, race
from benchmarks.peers import PACKAGES

WRONG = 5
ENTRANT_S = 300.0  # limit for loading and checking one contender, and for racing it, while the others wait
_PLAIN_WIDTH = 160  # columns, if the output is not a terminal
_RUNTIMES = ("triton", "onnxruntime-gpu", "tensorrt")


class ContenderRow(msgspec.Struct, frozen=True, kw_only=True):
    """One contender's printed and stored result. A ratio is its time divided by that of the first one, if that ran.

    `right` is set if its answer is correct; if it did not run, `verdict` gives the reason and there is no time. It was
    written at `t_wall` (seconds since 1970) by the code of `commit`.
    """

    device: str
    contender: str
    verdict: str
    right: bool
    median_ms: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    rounds: int | None = None
    versions: Mapping[str, str]
    t_wall: float | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Entrant:
    """A contender before the race: its call, or why there is none, and how its answer compares with the correct one.

    `calls` is how many times its call computes the answer.
    """

    name: str
    call: Callable[[], Any] | None
    verdict: str
    right: bool
    calls: int = 1


def failed(name: str, error: Exception) -> Entrant:
    """Return a contender that failed for a reason other than a missing package or a wrong name; the others continue."""
    return Entrant(name, None, in_a_line(error), right=False)


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError in the block after `ENTRANT_S`, as soon as Python code runs; for the main thread only."""

    def end(*_: object) -> NoReturn:
        raise TimeoutError(f"not ready in {ENTRANT_S:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, ENTRANT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(
    entrants: Sequence[Entrant], device: torch.device, seconds: float
) -> dict[str, PairedTiming | DroppedContender]:
    """Race the entrants that have a call; return results by name, with ratios of their times to the first entrant's."""
    starters = [(entrant.name, entrant.call, entrant.calls) for entrant in entrants if entrant.call]
    return {result.name: result for result in race(starters, device, seconds, entrants[0].name, ENTRANT_S)}


def fields(entrant: Entrant, result: PairedTiming | DroppedContender | None) -> dict[str, Any]:
    """Return a contender's own columns; before the race, these say that it has not run."""
    if isinstance(result, DroppedContender):
        return {"contender": entrant.name, "verdict": result.reason, "right": False}
    verdict = entrant.verdict if entrant.right or not entrant.call else f"WRONG: {entrant.verdict}"
    verdict += ", not raced" if entrant.call and result is None else ""
    columns: dict[str, Any] = {"contender": entrant.name, "verdict": verdict, "right": entrant.right}
    if result is not None:
        columns |= {"median_ms": result.median_ms, "ratio": result.ratio, "rounds": result.rounds}
        low, high = (result.interval.low, result.interval.high) if result.interval else (None, None)
        columns |= {"ratio_low": low, "ratio_high": high}
    return columns


def cells(row: ContenderRow) -> tuple[str, str]:
    """Return the time and the ratio as shown in a table."""
    return "-" if row.median_ms is None else f"{row.median_ms:.4g}", ratio(row)


def ratio(row: ContenderRow) -> str:
    """Return the ratio with its interval as shown in a table."""
    if row.ratio is None:
        return "-"
    reach = f" [{row.ratio_low:.3g}, {row.ratio_high:.3g}]" if row.ratio_low and row.ratio_high else ""
    return f"{row.ratio:.3g}{reach}"


def fastest_first(row: ContenderRow) -> tuple[bool, float]:
    """Return the sorting key for the rows of one race, in which those that did not run come last."""
    return row.median_ms is None, row.ratio or row.median_ms or 0.0


def console() -> Console:
    """Return the console that tables are printed on."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)


def end(wrong: Sequence[str]) -> NoReturn:
    """End the program, with status 5 and a message if any of our own answers is wrong."""
    if wrong:
        typer.echo(f"wrong answers: {', '.join(wrong)}", err=True)
    raise typer.Exit(WRONG if wrong else 0)


def write(rows: Sequence[ContenderRow], output: Path | None) -> None:
    """Append one JSON line for each contender."""
    if output is not None:
        columns = lines.stamp()
        lines.append(output, (msgspec.json.encode(msgspec.structs.replace(row, **columns)) for row in rows))


def open_device(name: str, threads: int | None) -> torch.device:
    """Return the device cpu, cuda or, for auto, the better of them, with a worker's settings."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's with torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads != 1)}"


def versions() -> dict[str, str]:
    """Return the versions of torch and of the packages of the peers."""
    return {"torch": str(torch.__version__)} | code.versions("benchd", *_RUNTIMES, *PACKAGES.values())


def as_a_worker(module: str) -> None:
    """Restart `python -m module` with a worker's environment, because heap settings are read before any allocation."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--device", default="auto")
    requested = options.parse_known_args()[0].device
    device = "cpu" if requested == "cpu" or not torch.cuda.is_available() else "cuda"
    wanted = environment(device, str(folders.cache()), None)
    if os.environ != wanted:
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], wanted)  # noqa: S606 - no shell

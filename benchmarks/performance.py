"""Generates docs/performance.md and its picture from the races under results/: `python -m benchmarks.performance`.

The page lists the winners; `results/<machine>/models.jsonl` and `kernels.jsonl` contain every contender's row. A test
compares page and picture with this module's output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Annotated, TypeVar

import msgspec
import typer

from benchd.daemon.records import Variant
from benchd.daemon.reporting.palette import GREY, colour
from benchd.daemon.reporting.tables import markdown_table
from benchmarks import kernels, lines, models, rows
from benchmarks.machine import BenchmarkMachine

HEAD = """# Performance

![Speed of benchd's best variant and of the best other build, as a multiple of eager's](pictures/performance.svg)

The contenders in a race take turns in one process, so their ratios hold even if the machine's speed drifts; times hold
only for that machine on that day. "Best" is our fastest variant that passed the check, in any precision. "Other build"
is the fastest of spikingjelly, mambapy and a loop over the time steps, at its best precision. "Flipped" is the share of
spikes that differ from float64, and images "disagree" if their class does.
[`benchmarks`](../benchmarks/README.md) writes this page from `results/`, which contains every contender with its
interval; `benchd report results/<machine>/records.jsonl` adds the energy.
"""
OF_MODELS = ("model", "batch", "best", "ms", "x over eager", "other build", "x over other", "answers")
OURS = "benchd"  # our contender in a kernel's race
AnyRow = TypeVar("AnyRow", bound=rows.ContenderRow)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Win:
    """A model's race at one batch size: eager, the fastest correct variant and the fastest correct peer."""

    device: str
    model: str
    batch_size: int
    direction: str
    best: models.ModelTiming
    eager: models.ModelTiming | None
    peer: models.ModelTiming | None


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="The folder of all machines.")] = Path("results"),
    docs: Annotated[Path, typer.Option(help="Where performance.md and pictures/performance.svg go.")] = Path("docs"),
) -> None:
    """Write the page and its picture."""
    (docs / "performance.md").write_text(whole(folder), encoding="utf-8")
    (docs / "pictures/performance.svg").write_text(picture(folder), encoding="utf-8")


def whole(folder: Path) -> str:
    """Return the page about all machines that have a subfolder of this folder."""
    return "\n".join([HEAD, *(page(path) for path in _machines(folder))]).rstrip() + "\n"


def page(folder: Path) -> str:
    """Return one machine's part of the page, without tables for what was not raced there."""
    machine = folder / "machine.json"
    races = list(wins(folder))
    described = msgspec.json.decode(machine.read_bytes(), type=BenchmarkMachine) if machine.exists() else None
    title = described.device if described else races[0].device if races else folder.name
    lines = [f"## {title}", ""]
    if described:
        versions, system = described.environment.versions, described.environment.os or "unknown system"
        lines += [
            f"torch {versions.get('torch', '?')}, {system}; one operator call costs {described.launch_us:.1f} us.",
            "",
        ]
    if races:
        lines += [*markdown_table(OF_MODELS, map(_win, races)), ""]
    if raced := sorted(_kernels(folder)):
        (least, slowest), (most, fastest) = raced[0], raced[-1]
        usual = median(speed for speed, _ in raced)
        speeds = f"median {usual:.2g}, from {least:.2g} ({slowest}) to {most:.2g} ({fastest})"
        lines += [f"Speedup of our kernels over the fastest other implementation at the largest shape: {speeds}.", ""]
    return "\n".join(lines)


def wins(folder: Path) -> Iterator[Win]:
    """Yield a machine's races of models, except those in which none of our variants gave correct answers."""
    races: dict[tuple[str, int, str], dict[str, models.ModelTiming]] = {}
    for row in _read(folder / "models.jsonl", models.ModelTiming):
        # of repeated races, the last one counts
        races.setdefault((row.model, row.batch_size, row.direction), {})[row.contender] = row
    for (model, batch_size, direction), contenders in sorted(races.items()):
        right = [row for row in contenders.values() if row.right and row.median_ms]
        best = _fastest(row for row in right if not row.is_peer and "/" not in row.contender)
        if best:
            eager, peer = contenders.get("eager"), _fastest(row for row in right if row.is_peer)
            yield Win(best.device, model, batch_size, direction, best, eager, peer)


def _win(win: Win) -> tuple[str, ...]:
    others = (_times(win.eager, win.best), win.peer.contender if win.peer else "-", _times(win.peer, win.best))
    model = win.model if win.direction == "inference" else f"{win.model}, {win.direction}"
    best, answers = win.best, win.best.verdict.removeprefix("passed: ")
    return model, str(win.batch_size), best.contender, f"{best.median_ms:.3g}", *others, answers


def _kernels(folder: Path) -> Iterator[tuple[float, str]]:
    """Yield each of our kernels' speedup over the fastest other contender, at its largest shape, and its name."""
    races: dict[tuple[str, str], dict[tuple[int, ...], dict[str, kernels.OpTiming]]] = {}
    for row in _read(folder / "kernels.jsonl", kernels.OpTiming):
        if not row.captured:
            shapes = races.setdefault((row.op, row.dtype), {})
            shapes.setdefault(tuple(row.shape), {})[row.contender] = row
    for (op, dtype), shapes in races.items():
        right = {name: row for name, row in shapes[max(shapes, key=math.prod)].items() if row.right and row.median_ms}
        ours = right.pop(OURS, None)
        other = _fastest(right.values())
        if ours and other:
            yield _speed(other, ours), f"{op}, {dtype}"


def picture(folder: Path) -> str:
    """Return an SVG of all inference races: bars for the speedups of our best variant and the best peer over eager."""
    bar, gap, left, width = 14, 12, 330, 900
    races = [win for path in _machines(folder) for win in wins(path) if win.eager and win.direction == "inference"]
    bars = [(win, row, _speed(win.eager, row)) for win in races for row in (win.best, win.peer) if row and win.eager]
    most = max((speed for *_, speed in bars), default=1.0)
    lines, y, last = [], gap, None
    for win, row, speed in bars:
        if win is not last:
            y += gap if last else 0
            if last is None or win.device != last.device:
                lines.append(f'<text x="8" y="{y + bar}" font-weight="bold">{escape(win.device)}</text>')
                y += bar + gap
            lines.append(f'<text x="24" y="{y + bar - 2}">{escape(win.model)}, batch {win.batch_size}</text>')
            last = win
        length = (width - left - 220) * speed / most
        fill = GREY if row.is_peer else colour(Variant.parse(row.contender))
        lines.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar}" fill="{fill}"/>')
        label = f"{speed:.3g} x, {escape(row.contender)}"
        lines.append(f'<text x="{left + length + 6:.1f}" y="{y + bar - 2}">{label}</text>')
        y += bar + 2
    view = f'viewBox="0 0 {width} {y + gap}" font-family="sans-serif" font-size="12"'
    ground = f'<rect width="{width}" height="{y + gap}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', ground, *lines, "</svg>"]) + "\n"


def _machines(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _read(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """Return the rows of a kind, from its own file or, for bench-quarter, from the file with all kinds."""
    own_rows = (
        [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()] if path.exists() else []
    )
    key = "op" if kind is kernels.OpTiming else "model"
    entries = (
        entry for entry in lines.whole(path.with_name("rows.jsonl")) if key in entry[0] and not entry[0].get("host")
    )
    return own_rows + [msgspec.json.decode(line, type=kind) for _, line in entries]


def _fastest(contenders: Iterable[AnyRow]) -> AnyRow | None:
    return min(contenders, key=rows.fastest_first, default=None)


def _speed(slow: rows.ContenderRow, fast: rows.ContenderRow) -> float:
    """Return the time of `slow` divided by that of `fast`, from the ratios of their race if available."""
    if slow.ratio and fast.ratio:
        return slow.ratio / fast.ratio
    return (slow.median_ms or math.nan) / (fast.median_ms or math.nan)


def _times(slow: rows.ContenderRow | None, fast: rows.ContenderRow) -> str:
    return f"{_speed(slow, fast):.3g}" if slow and slow.median_ms else "-"


if __name__ == "__main__":
    app()

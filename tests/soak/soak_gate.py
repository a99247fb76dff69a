"""How often the gate of docs/ci.md is right on this machine: trials with a planted slowdown of 5 %, and with none.

`make soak-gate` takes about one and a half hours and resumes where it was stopped: each trial is kept when it ends.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from tests.soak.soak_aa import compared, keep, read

FILE = "soak_gate.jsonl"
ANSWERS = ("slower", "same", "inconclusive", "faster")
BASE, PLANTED = 20, 21  # layers: about 5 ms on one thread
NET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range({layers}) for layer in (nn.Linear(128, 128), nn.ReLU())))
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: make soak-gate ARGS='--trials 10'")
def main(
    trials: Annotated[int, typer.Option(help="Trials of each kind.", min=1)] = 40,
    output: Annotated[Path, typer.Option(help=f"Folder of {FILE}.")] = Path("bench-out/soak-gate"),
    arguments: Annotated[str, typer.Option(help="Further arguments of benchd compare.")] = "",
) -> None:
    """Run the gate on a module with one layer more and on an equal one, in turn; print what it answered."""
    output.mkdir(parents=True, exist_ok=True)
    for is_planted in _left(read(output / FILE), trials):
        line = {"planted": is_planted, **_trial(is_planted, arguments.split())}
        typer.echo(f"{_kind(is_planted)}: {line['answer']} after {line['seconds']:.0f} s")
        keep(output / FILE, line)
    for text in summary(read(output / FILE)):
        typer.echo(text)


def _left(lines: Sequence[dict[str, Any]], trials: int) -> Iterator[bool]:
    """Yield whether each trial that is left is a planted one."""
    counts = Counter(bool(line["planted"]) for line in lines)
    for number in range(trials):
        yield from (is_planted for is_planted in (True, False) if number >= counts[is_planted])


def _kind(is_planted: bool) -> str:
    return "5 % planted" if is_planted else "identical"


def _trial(is_planted: bool, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the gate once; return its answer, interval and seconds."""
    with TemporaryDirectory() as folder:
        modules = []
        for name, layers in (("base", BASE), ("change", PLANTED if is_planted else BASE)):
            path = Path(folder, name, "net.py")
            path.parent.mkdir()
            path.write_text(NET.format(layers=layers))
            modules += ["--module", f"{path}:build"]
        case = ["--input", "384x128", "--variants", "eager", "--batch-sizes", "1", "--threads", "1"]
        started_s = time.monotonic()
        comparison = compared("--live", *modules, *case, "--output", f"{folder}/out", *arguments)
    verdict = comparison["verdict"]
    return {
        "answer": verdict["answer"],
        "effect": verdict["effect"],
        "interval": verdict["interval"],
        "pairs": len(comparison["ratios"]),
        "seconds": time.monotonic() - started_s,
    }


def summary(kept: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each kind of trial: how often each answer was given, and how long it took."""
    for is_planted in (True, False):
        lines = [line for line in kept if line["planted"] is is_planted]
        if lines:
            answers = Counter(line["answer"] for line in lines)
            seconds = [line["seconds"] for line in lines]
            verdicts = ", ".join(f"{answers[answer]} {answer}" for answer in ANSWERS)
            took = f"median {median(seconds):.0f} s, longest {max(seconds):.0f} s"
            yield f"{_kind(is_planted)}, {len(lines)} trials: {verdicts}; {took}"


if __name__ == "__main__":
    app()

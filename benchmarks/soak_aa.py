"""How often this machine calls identical code different: many real A/A comparisons, every second beside another load.

`make soak-aa` takes hours and goes on where it was stopped: each comparison is kept when it ends. The noise floor of
`benchd compare --aa` is not touched.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from benchd.daemon.delivery import jsonl
from benchd.daemon.statistics import share_upper_bound
from benchmarks.commands import command

FILE = "soak_aa.jsonl"
_LOAD = "while True: pass"
_LIMITS = "[limits]\nwarm_up_cap_s = 0.5\nmeasure_cap_s = 1.5\n"
"""As short as the protocol allows, five blocks; a verdict stands on processes, and pays for what blocks leave open."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog='Example: make soak-aa ARGS="--case square,size=64=20"')
def main(
    case: Annotated[
        list[str] | None, typer.Option(help="A case and how many; may be repeated.", metavar="CASE=COUNT")
    ] = None,
    output: Annotated[Path, typer.Option(help=f"Folder of {FILE}.")] = Path("bench-out/soak-aa"),
    arguments: Annotated[str, typer.Option(help="Further arguments of benchd compare.")] = "",
) -> None:
    """Compare each case with itself until so many comparisons are kept; print how many were false."""
    wanted = [text.rpartition("=") for text in case or ["square=100", "snn_onepass=20"]]
    output.mkdir(parents=True, exist_ok=True)
    given = arguments.split() or _short(output)
    for name, _, count in wanted:
        for number in range(len(_kept(output, name)), int(count)):
            print_line(f"{name} {number + 1} of {count}")
            _append(output, name, beside_load=number % 2 == 1, arguments=given)
    for name, _, _ in wanted:
        for line in _summary(name, _kept(output, name)):
            print_line(line)
    print_line(f"each by: benchd compare --aa CASE {' '.join(given)}")


def _short(output: Path) -> list[str]:
    """Return the arguments that keep a comparison short."""
    path = output / "limits.toml"
    path.write_text(_LIMITS)
    return ["--config", str(path)]


def print_line(text: str) -> None:
    """Print at once, for who watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _kept(output: Path, name: str) -> list[dict[str, Any]]:
    """Return the comparisons of a case so far."""
    path = output / FILE
    lines = [json.loads(line) for line in jsonl.read(path)] if path.exists() else []
    return [line for line in lines if line["case"] == name]


def _append(output: Path, name: str, beside_load: bool, arguments: Sequence[str]) -> None:
    """Make one comparison and keep its verdict."""
    with _load() if beside_load else nullcontext():
        verdict = _compare(output, name, arguments)
    line = {"case": name, "beside_load": beside_load, "answer": verdict["answer"], "effect": verdict["effect"]}
    with closing(jsonl.Journal(output / FILE)) as journal:
        journal.append(json.dumps(line).encode())


@contextmanager
def _load() -> Iterator[None]:
    """Keep one CPU busy."""
    with subprocess.Popen([sys.executable, "-c", _LOAD]) as process:
        try:
            yield
        finally:
            process.kill()


def _compare(output: Path, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    line = command("benchd", "compare", "--aa", name, "--json", "--output", str(output), *arguments)
    state = os.environ | {"STATE_DIRECTORY": str(output.resolve() / "state")}
    done = subprocess.run(line, stdout=subprocess.PIPE, env=state, check=False)
    if done.returncode not in (0, 3, 4):
        sys.exit(done.returncode)  # it has said why
    (comparison,) = json.loads(done.stdout)
    verdict: dict[str, Any] = comparison["verdict"]
    return verdict


def _summary(name: str, kept: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many comparisons of a case were false, in all and in each half."""
    halves = {"alone": False, "beside another load": True}
    lines = [_counts(name, kept)] if kept else []
    for half, beside_load in halves.items():
        found = [line for line in kept if line["beside_load"] is beside_load]
        lines += [_counts(f"    {half}", found)] if found else []
    return lines


def _counts(name: str, kept: Sequence[dict[str, Any]]) -> str:
    """Return how many comparisons were false, with the upper 95 % bound of their share."""
    answers = [line["answer"] for line in kept]
    false = sum(answer in ("faster", "slower") for answer in answers)
    bound = 100 * share_upper_bound(false, len(answers))
    others = ", ".join(f"{answers.count(answer)} {answer}" for answer in ("same", "inconclusive"))
    return f"{name}: {false} of {len(answers)} false (at most {bound:.1f} % with 95 % confidence), {others}"


if __name__ == "__main__":
    app()

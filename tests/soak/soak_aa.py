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
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple

import typer
from scipy import stats

from benchd.daemon import journal
from benchmarks.commands import command

FILE = "soak_aa.jsonl"
DEFAULT = ("square,eager,b1,threads=1=100", "snn_onepass,eager,b1,threads=1=60")
"""One thread: two wait for each other beside a load, and the check alone then takes 26 s a process instead of 0.3."""
Half = Literal["alone", "loaded"]
_LOAD = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"
"""It ends with its parent, however that ends."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog='Example: make soak-aa ARGS="--case square,size=64=20"')
def main(
    case: Annotated[
        list[str] | None, typer.Option(help="A case and how many; may be repeated.", metavar="CASE=COUNT")
    ] = None,
    output: Annotated[Path, typer.Option(help=f"Folder of {FILE}.")] = Path("bench-out/soak-aa"),
    half: Annotated[Half | None, typer.Option(help="Make this half of them only; both by turns otherwise.")] = None,
    arguments: Annotated[str, typer.Option(help="Further arguments of benchd compare.")] = "",
) -> None:
    """Compare each case with itself until so many comparisons are kept; print how many were false."""
    wanted = [text.rpartition("=") for text in case or DEFAULT]
    output.mkdir(parents=True, exist_ok=True)
    given = arguments.split()
    for name, _, count in wanted:
        lines = read(output / FILE, name)
        for number, beside_load in enumerate(_left(lines, int(count), half), len(lines) + 1):
            print_line(f"{name} {number} of {count}")
            _append(output, name, beside_load, given)
    for name, _, _ in wanted:
        for which, tally in counts(read(output / FILE, name)).items():
            print_line(f"{name}, {which}: {tally}")
    print_line(f"each by: benchd compare --aa CASE {arguments}".rstrip())


def print_line(text: str) -> None:
    """Print at once, for who watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read(path: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Return the comparisons in a file, of one case where it is named."""
    lines = [json.loads(line) for line in journal.read(path)] if path.exists() else []
    return [line for line in lines if name is None or line["case"] == name]


def _left(lines: Sequence[dict[str, Any]], count: int, half: Half | None) -> list[bool]:
    """Return the comparisons still to be made: for each whether a load runs beside it."""
    left = [number % 2 == 1 for number in range(count)]
    for line in lines:
        if line["beside_load"] in left:
            left.remove(line["beside_load"])
    return [beside_load for beside_load in left if half is None or beside_load is (half == "loaded")]


def _append(output: Path, name: str, beside_load: bool, arguments: Sequence[str]) -> None:
    """Make one comparison and keep its verdict."""
    with _load() if beside_load else nullcontext():
        verdict = compared("--aa", name, "--output", str(output), *arguments)["verdict"]
    line = {"case": name, "beside_load": beside_load, "answer": verdict["answer"], "effect": verdict["effect"]}
    keep(output / FILE, line)


def keep(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a file, where it lasts."""
    with closing(journal.Journal(path)) as comparisons:
        comparisons.append(json.dumps(line).encode())


@contextmanager
def _load() -> Iterator[None]:
    """Keep one CPU busy."""
    with subprocess.Popen([sys.executable, "-c", _LOAD, str(os.getpid())]) as process:
        try:
            yield
        finally:
            process.kill()


def compared(*arguments: str) -> dict[str, Any]:
    """Return what one `benchd compare` finds; if it cannot be made, end with its exit code."""
    line = command("benchd", "compare", *arguments, "--json")
    with TemporaryDirectory() as state:  # each by its own: a noise floor of those before would excuse this one
        environment = os.environ | {"STATE_DIRECTORY": state}
        done = subprocess.run(line, stdout=subprocess.PIPE, env=environment, check=False)
    if done.returncode not in (0, 3, 4):
        sys.exit(done.returncode)  # it has said why
    comparison: dict[str, Any]
    (comparison,) = json.loads(done.stdout)
    return comparison


class Counts(NamedTuple):
    """How many comparisons were false, with the upper 95 % bound of their share, and what the others answered."""

    made: int
    false: int
    bound: float
    same: int
    inconclusive: int

    def __str__(self) -> str:
        """Return them as a sentence."""
        share = f"at most {100 * self.bound:.1f} % with 95 % confidence"
        return f"{self.false} of {self.made} false ({share}), {self.same} same, {self.inconclusive} inconclusive"


def counts(kept: Sequence[dict[str, Any]]) -> dict[str, Counts]:
    """Return the counts of all these comparisons and of each half that has any."""
    halves = {
        "all": kept,
        "alone": [line for line in kept if not line["beside_load"]],
        "beside another load": [line for line in kept if line["beside_load"]],
    }
    return {half: _counts(lines) for half, lines in halves.items() if lines}


def _counts(lines: Sequence[dict[str, Any]]) -> Counts:
    answers = [line["answer"] for line in lines]
    false = answers.count("faster") + answers.count("slower")
    bound = stats.binomtest(false, len(answers), alternative="less").proportion_ci(0.95, method="exact").high
    return Counts(len(answers), false, bound, answers.count("same"), answers.count("inconclusive"))


if __name__ == "__main__":
    app()

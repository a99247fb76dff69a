"""docs/performance.md, made of the records under results/: every figure in it is one of theirs.

`python -m benchmarks.performance` writes it anew; a test holds the page against the records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import msgspec
import typer

from benchd.daemon.profiling.profile import Profile, TorchProfile
from benchd.daemon.records import Record
from benchd.daemon.reporting.cells import COLUMNS, cells
from benchd.daemon.reporting.tables import markdown_table
from benchd.daemon.verdicts import results
from benchd.kernels.shipped import Compiled
from benchmarks import kernels, models, rows
from benchmarks.machine import Machine
from tests.soak import soak, soak_aa

HEAD = """# Performance

Measured by `make bench-cpu` and `make bench-gpu`; the records lie under `results/`. A ratio is of runs that took turns
in one process; a time by itself holds for that machine on that day. Made by `python -m benchmarks.performance`.
"""
OURS = "benchd"
TESTS, OCCUPANCY = "tests.json", "occupancy.json"
REPEATS = 5  # fresh processes, from which on a scatter is said

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Found:
    """What the stages left in a machine's folder; of repeated measurements the last one stands."""

    name: str
    machine: Machine | None
    tests: Mapping[str, Mapping[str, int]]
    captured: list[kernels.Row]
    kernels: list[kernels.Row]
    models: list[models.Row]
    records: list[Record]
    profiles: list[Profile]
    compiled: list[Compiled]
    comparisons: list[dict[str, Any]]
    soak: list[soak.Figure]


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="The folder of all machines.")] = Path("results"),
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/performance.md"),
) -> None:
    """Write the page of all machines."""
    output.write_text(whole(folder), encoding="utf-8")


def whole(folder: Path) -> str:
    """Return the page of every machine's folder in this one."""
    return "\n".join([HEAD, *(page(path) for path in sorted(folder.iterdir()) if path.is_dir())])


def page(folder: Path) -> str:
    """Return one machine's part of the page, without what its stages have not measured."""
    found = read(folder)
    parts = (_machine, _tests, _kernels, _models, _records, _profiles, _occupancy, _targets, _comparisons, _soak)
    devices = [found.machine.device] if found.machine else [row.device for row in found.models]
    title = (devices or [found.name])[0]
    return "\n".join([f"## {title}", "", *(line for part in parts for line in part(found))])


def read(folder: Path) -> Found:
    """Return what lies in the folder of a machine."""
    machine, records, tests = folder / "machine.json", folder / "records.jsonl", folder / TESTS
    profiles = sorted((folder / "profiles").glob("*.json"))
    races: list[kernels.Row] = _last(
        _lines(folder / "kernels.jsonl", kernels.Row),
        lambda row: (row.op, row.shape, row.dtype, row.device, row.captured),
    )
    return Found(
        name=folder.name,
        machine=msgspec.json.decode(machine.read_bytes(), type=Machine) if machine.exists() else None,
        tests=json.loads(tests.read_text()) if tests.exists() else {},
        kernels=[row for row in races if not row.captured],
        captured=[row for row in races if row.captured],
        models=_last(
            _lines(folder / "models.jsonl", models.Row),
            lambda row: (row.model, row.options, row.batch_size, row.direction),
        ),
        records=list(
            {record.case_id: record for record in (results.read(records) if records.exists() else [])}.values()
        ),
        profiles=[msgspec.json.decode(path.read_bytes(), type=Profile) for path in profiles],
        compiled=_compiled(folder / OCCUPANCY),
        comparisons=soak_aa.read(folder / soak_aa.FILE),
        soak=[figure for part in soak.read(folder / soak.FILE).values() for figure in part],
    )


def _compiled(path: Path) -> list[Compiled]:
    return msgspec.json.decode(path.read_bytes(), type=_Compiled).kernels if path.exists() else []


class _Compiled(msgspec.Struct):
    """What is read of what `benchd list --kernels --json` prints."""

    kernels: list[Compiled]


def _lines(path: Path, kind: type[Any]) -> list[Any]:
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()] if path.exists() else []


def _last(found: Sequence[Any], race: Callable[[Any], Any]) -> list[Any]:
    """Return the rows of the last race of each kind: one row a contender."""
    kept = {json.dumps([race(row), row.contender]): row for row in found}
    return list(kept.values())


def _machine(found: Found) -> Iterator[str]:
    if found.machine is None:
        return
    environment = found.machine.environment
    yield f"torch {environment.versions.get('torch', '?')}, {environment.os or '?'},"
    yield f"an operator on one number takes {found.machine.launch_us:.2f} us."
    yield ""
    yield from _table(
        ("precision", "copy GB/s", "products GFLOP/s", "in", "exponentials G/s", "by"),
        (
            (
                precision,
                f"{probes.copy_bytes_per_s / 1e9:.3g}",
                f"{probes.matrix_flops_per_s / 1e9:.4g}",
                probes.matrix_dtype,
                f"{probes.exponentials_per_s / 1e9:.3g}",
                probes.exponentials_by,
            )
            for precision, probes in found.machine.probes.items()
        ),
    )


def _tests(found: Found) -> Iterator[str]:
    return _section(
        "Correctness",
        ("tests", "ran", "failed", "skipped"),
        (
            (name, str(its["tests"] - its["skipped"]), str(its["failures"] + its["errors"]), str(its["skipped"]))
            for name, its in found.tests.items()
        ),
    )


def _kernels(found: Found) -> Iterator[str]:
    words = "The time of ours, and how many times it the others take"
    yield from _races("Kernels", found.kernels, f"{words}.")
    yield from _races("In CUDA graphs", found.captured, f"{words}: the GPU's alone, without the host's.")


def _races(title: str, raced: Sequence[kernels.Row], words: str) -> Iterator[str]:
    others = list(dict.fromkeys(row.contender for row in raced if row.ratio and row.contender != OURS))
    races: dict[tuple[str, str, str], dict[str, kernels.Row]] = {}
    for row in raced:
        shape = ",".join(map(str, row.shape))
        races.setdefault((row.op, shape, row.dtype), {})[row.contender] = row
    return _section(
        title,
        ("op", "shape", "dtype", "ours ms", "x of floor", "bound by", "answer", *others),
        (
            (*race, *_ours(by_name.get(OURS)), *(_ratio(by_name.get(name)) for name in others))
            for race, by_name in races.items()
        ),
        words,
    )


def _ours(row: kernels.Row | None) -> tuple[str, str, str, str]:
    if row is None or row.median_ms is None:
        return "-", "-", "-", row.verdict if row else "-"
    return f"{row.median_ms:.4g}", f"{row.x_of_floor:.3g}", row.bound_by, row.verdict


def _ratio(row: rows.Timed | None) -> str:
    if row is None or row.ratio is None:
        return "-"
    return rows.ratio(row) + ("" if row.right else " (wrong)")


def _models(found: Found) -> Iterator[str]:
    if not found.models:
        return
    yield "### Models"
    yield ""
    yield "How many times eager's time each takes; the fastest first."
    races: dict[tuple[str, int, str], list[models.Row]] = {}
    for row in found.models:
        races.setdefault((row.model, row.batch_size, row.direction), []).append(row)
    for (model, batch, direction), raced in races.items():
        yield ""
        yield f"**{model}, batch {batch}, {direction}**"
        yield ""
        ran = sorted((row for row in raced if row.median_ms), key=rows.fastest_first)
        yield from _table(
            ("contender", "ms", "its time over eager's", "answer against float64"),
            ((row.contender, f"{row.median_ms:.4g}", _ratio(row), row.verdict) for row in ran),
        )


def _records(found: Found) -> Iterator[str]:
    words = "Each case in a process of its own, from input to output on the host; the table of `benchd report`."
    return _section("Records", list(COLUMNS.values()), map(cells, found.records), words)


def _profiles(found: Found) -> Iterator[str]:
    headings = ("case", "launches a step", "GPU busy", "most time in", "findings")
    return _section("Profiles", headings, map(_profile, found.profiles))


def _launches_a_step(torch: TorchProfile | None) -> float | None:
    return torch.launches / len(torch.steps) if torch and torch.steps else None


def _profile(profile: Profile) -> tuple[str, ...]:
    torch = profile.torch
    launches = _launches_a_step(torch)
    busy = f"{torch.gpus[0].utilization:.1%}" if torch and torch.gpus else "-"
    operators = sorted(torch.operators, key=lambda row: -(row.self_device_ns or row.self_cpu_ns)) if torch else []
    titles = "; ".join(finding.title for finding in profile.findings) or "-"
    return (
        profile.case_id,
        "-" if launches is None else f"{launches:.0f}",
        busy,
        operators[0].name if operators else "-",
        titles,
    )


@dataclass(frozen=True)
class Traced:
    """A kernel of ours in a profile's trace; what it takes (registers, shared bytes) there and as compiled ahead."""

    case_id: str
    function: str
    traced: tuple[int, int]
    compiled: set[tuple[int, int]]

    @property
    def agrees(self) -> bool:
        """Say whether it takes what was compiled ahead."""
        return self.traced in self.compiled


def _traced(found: Found) -> Iterator[Traced]:
    for profile in found.profiles:
        gpus = profile.torch.gpus if profile.torch else []
        sm = gpus[0].compute_capability.replace(".", "") if gpus and gpus[0].compute_capability else None
        for row in profile.torch.kernels if profile.torch else []:
            compiled = {
                (each.registers, each.shared_bytes)
                for each in found.compiled
                if each.function == row.name and str(each.sm) == sm
            }
            if compiled and row.registers is not None and row.shared_bytes is not None:
                yield Traced(profile.case_id, row.name, (row.registers, row.shared_bytes), compiled)


def _occupancy(found: Found) -> Iterator[str]:
    return _section(
        "Static occupancy against the trace's",
        ("case", "kernel", "registers, shared bytes in the trace", "compiled ahead", ""),
        (
            (
                row.case_id,
                row.function,
                _pair(row.traced),
                "; ".join(map(_pair, sorted(row.compiled))),
                "agree" if row.agrees else "DIFFER",
            )
            for row in _traced(found)
        ),
        "What decides how many blocks an SM holds, as compiled ahead for this architecture and as launched.",
    )


def _pair(pair: tuple[int, int]) -> str:
    return f"{pair[0]}, {pair[1]}"


@dataclass(frozen=True)
class Target:
    """What was wanted of a GPU, and how it is read off what was found: None where that was not measured."""

    what: str
    wanted: float
    unit: str
    found: Callable[[Found], float | None]
    at_most: bool = False

    def row(self, found: Found) -> tuple[str, ...]:
        """Return a line of the table."""
        value = self.found(found)
        wanted = f"{'at most' if self.at_most else 'at least'} {self.wanted:g}{self.unit}"
        if value is None:
            return self.what, wanted, "not measured", "-"
        met = value <= self.wanted if self.at_most else value >= self.wanted
        return self.what, wanted, f"{value:.3g}{self.unit}", soak.verdict(met)


def _inference(found: Found, model: str, batch: int) -> list[models.Row]:
    """Return the race of a model, without who did not run."""
    wanted = (model, batch, "inference")
    return [row for row in found.models if row.median_ms and (row.model, row.batch_size, row.direction) == wanted]


def _time(raced: Sequence[models.Row], contender: str | None) -> float | None:
    """Return the least ratio of one contender in any precision, without a name of ours; who is wrong does not count."""
    wanted = (row for row in raced if (_is_ours(row) if contender is None else _is_of(row, contender)))
    return min((row.ratio for row in wanted if row.right and row.ratio), default=None)


def _is_ours(row: models.Row) -> bool:
    return not row.is_peer and "/" not in row.contender


def _is_of(row: models.Row, contender: str) -> bool:
    return row.contender == contender or row.contender.startswith(f"{contender}, ")


def _is_captured(row: models.Row) -> bool:
    """Say whether a CUDA graph spares it the host's time: TensorRT's engines are replayed as one too."""
    return "cudagraph" in row.contender or "tensorrt" in row.contender


def _faster(
    model: str, batch: int, other: str, best: str | None = None, *, captured: bool = True
) -> Callable[[Found], float | None]:
    """Return how many times the time of `best`, or of our fastest, with or without those captured, the other takes."""

    def value(found: Found) -> float | None:
        raced = [row for row in _inference(found, model, batch) if captured or not _is_captured(row)]
        mine, theirs = _time(raced, best), _time(raced, other)
        return theirs / mine if mine and theirs else None

    return value


def _slower(model: str, batch: int, other: str) -> Callable[[Found], float | None]:
    """Return how many times the time of the other one our fastest takes."""
    faster = _faster(model, batch, other)
    return lambda found: 1 / value if (value := faster(found)) else None


def _milliseconds(model: str, batch: int, contender: str) -> Callable[[Found], float | None]:
    def value(found: Found) -> float | None:
        rows = [row for row in _inference(found, model, batch) if row.contender == contender and row.right]
        return rows[0].median_ms if rows else None

    return value


def _launches(model: str, variant: str) -> Callable[[Found], float | None]:
    def value(found: Found) -> float | None:
        wanted = (each.torch for each in found.profiles if each.case_id.startswith(f"{model},{variant},"))
        return _launches_a_step(next(filter(None, wanted), None))

    return value


def _against_spikingjelly(*ops: str) -> Callable[[Found], float | None]:
    """Return how many times ours its best back end takes, in the op where that is the least."""

    def value(found: Found) -> float | None:
        theirs: dict[tuple[str, str, str], float] = {}
        for row in found.kernels:
            if row.op in ops and row.contender.startswith("spikingjelly") and row.ratio and row.right:
                race = (row.op, str(row.shape), row.dtype)
                theirs[race] = min(row.ratio, theirs.get(race, row.ratio))
        return min(theirs.values(), default=None)

    return value


def _share_of_floor(found: Found) -> float | None:
    """Return the share of the floor that the worst of our kernels reaches at its largest shape."""
    worst: dict[str, kernels.Row] = {}
    for row in found.kernels:
        if row.contender == OURS and row.x_of_floor:
            worst[row.op] = max(
                row, worst.get(row.op, row), key=lambda each: (math.prod(each.shape), each.x_of_floor or 0.0)
            )
    return min((100 / (row.x_of_floor or 1.0) for row in worst.values()), default=None)


def _agreement(found: Found) -> float | None:
    """Return the share of our traced kernels that take what was compiled ahead, in per cent."""
    rows = list(_traced(found))
    return 100 * sum(row.agrees for row in rows) / len(rows) if rows else None


def _energies(record: Record) -> list[float]:
    return [each.energy.gross_per_inference_j for each in record.processes if each.energy]


def _energy_scatter(found: Found) -> float | None:
    """Return the largest coefficient of variation of the energy per inference over a case's processes, in per cent."""
    repeated = [energies for record in found.records if len(energies := _energies(record)) >= REPEATS]
    return max((100 * stdev(energies) / fmean(energies) for energies in repeated), default=None)


def _counter_against_integral(found: Found) -> float | None:
    """Return the largest difference of two sources over the same window, in per cent."""
    checked = [record.energy for record in found.records if record.energy and record.energy.cross_check]
    return max(
        (100 * abs(each.cross_check.energy_j / each.energy_j - 1) for each in checked if each.cross_check), default=None
    )


_OFFICIAL = "mamba-ssm + causal-conv1d"
_GRAPH = "custom-cudagraph-fp16"
TARGETS = (
    Target(
        "vim_tiny batch 4, our best without a CUDA graph against mamba-ssm",
        5.0,
        " x",
        _faster("vim_tiny", 4, _OFFICIAL, captured=False),
    ),
    Target(
        "vim_tiny batch 64, our best without a CUDA graph against mamba-ssm",
        3.0,
        " x",
        _faster("vim_tiny", 64, _OFFICIAL, captured=False),
    ),
    Target(f"vim_tiny {_GRAPH} batch 1", 0.25, " ms", _milliseconds("vim_tiny", 1, _GRAPH), at_most=True),
    Target(f"vim_tiny {_GRAPH} batch 64", 2.0, " ms", _milliseconds("vim_tiny", 64, _GRAPH), at_most=True),
    Target("vim_tiny custom, launches a forward pass", 100, "", _launches("vim_tiny", "custom"), at_most=True),
    Target(
        "snn_onepass batch 256, custom-fp16 against amp", 6.0, " x", _faster("snn_onepass", 256, "amp", "custom-fp16")
    ),
    Target(
        "snn_onepass custom-fp16 batch 256", 0.25, " ms", _milliseconds("snn_onepass", 256, "custom-fp16"), at_most=True
    ),
    Target("snn_stbif_resnet18 batch 1, our best against eager", 8.0, " x", _faster("snn_stbif_resnet18", 1, "eager")),
    Target(
        "snn_stbif_resnet18 batch 1, our best over qann_resnet18's eager",
        2.0,
        " x",
        _slower("snn_stbif_resnet18", 1, "qann_resnet18/eager"),
        at_most=True,
    ),
    Target("lif and stbif against spikingjelly's best", 1.3, " x", _against_spikingjelly("lif", "stbif")),
    Target(
        "lif with its pool against spikingjelly's best", 2.5, " x", _against_spikingjelly("lif_pool", "lif_pool_repeat")
    ),
    Target("share of the floor, the worst kernel at its largest shape", 50, " %", _share_of_floor),
    Target("kernels whose traced registers and shared memory are those compiled ahead", 100, " %", _agreement),
    Target("energy an inference, coefficient of variation", 3, " %", _energy_scatter, at_most=True),
    Target("energy by the counter against the integral of the power", 5, " %", _counter_against_integral, at_most=True),
)


def _targets(found: Found) -> Iterator[str]:
    targets = TARGETS if "h200" in found.name else ()
    return _section("Targets", ("what", "wanted", "measured", ""), (target.row(found) for target in targets))


def _comparisons(found: Found) -> Iterator[str]:
    return _section(
        "Verdicts on identical code",
        ("case", "comparisons", "made", "false", "at most, with 95 % confidence", "same", "inconclusive"),
        (
            (case, half, str(its.made), str(its.false), f"{its.bound:.1%}", str(its.same), str(its.inconclusive))
            for case in dict.fromkeys(line["case"] for line in found.comparisons)
            for half, its in soak_aa.counts([line for line in found.comparisons if line["case"] == case]).items()
        ),
        "Cases compared with themselves by `make soak-aa`: FASTER and SLOWER are false, and 5 % of them are allowed.",
    )


def _soak(found: Found) -> Iterator[str]:
    return _section(
        "Delivery",
        ("figure", "value", "target", ""),
        ((figure.name, f"{figure.value:,.6g}", figure.target, soak.verdict(figure.met)) for figure in found.soak),
        "By `make soak`, with real processes: the service, mosquitto, a collector.",
    )


def _section(
    title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], words: str | None = None
) -> Iterator[str]:
    """Yield a heading, what the table below it means, and the table; nothing where that has no lines."""
    known = list(lines)
    if known:
        yield from (f"### {title}", "", *((words, "") if words else ()))
        yield from _table(columns, known)


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from markdown_table(columns, lines)
    yield ""


if __name__ == "__main__":
    app()

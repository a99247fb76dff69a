"""Parses the CSV of `nsys stats` (2023.1 and newer) and of ncu's raw page (2022 and newer).

Both print other lines around the tables, quote names that contain commas, and may use thousands separators.
"""

import csv
from collections.abc import Iterator

import msgspec

from benchd.daemon.errors import Unsupported
from benchd.daemon.profiling.profile import KernelRow, NsightCompute, NsightSystems, Operator, Range
from benchd.daemon.profiling.trace.tables import mean
from benchd.daemon.profiling.trace.trace import COUNTERS_CURE

_DURATION = "gpu__time_duration.sum"
_MEASURED = "sm__warps_active.avg.pct_of_peak_sustained_active"
_THEORETICAL = "sm__maximum_warps_per_active_cycle_pct"
_REGISTERS = "launch__registers_per_thread"
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
# some architectures count only one of them
_TENSOR_CORES = (
    "sm__inst_executed_pipe_tensor.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
)
_LIMITS = {
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "warps",
    "launch__occupancy_limit_blocks": "blocks",
}
METRICS = (_DURATION, _MEASURED, _THEORETICAL, _REGISTERS, *_SHARED, *_TENSOR_CORES, *_LIMITS)
_BASE_UNITS = {_DURATION: ("ns", "nsecond"), **dict.fromkeys(_SHARED, ("byte/block",))}


def systems(text: str, report: str) -> NsightSystems:
    """Return the tables of `nsys stats --format=csv`, in nanoseconds; raise Unsupported if they contain no kernel."""
    rows = list(_nsys_rows(text))
    kernels = [_nsys_kernel(row) for row in rows if "Name" in row and "Instances" in row]
    if not kernels:
        raise Unsupported(f"nsys recorded no kernels: {COUNTERS_CURE}{last_words(text)}")
    return NsightSystems(
        report=report,
        kernels=kernels,
        runtime=[_nsys_call(row) for row in rows if "Num Calls" in row],
        ranges=[_nsys_range(row) for row in rows if "Range" in row],
    )


def _nsys_rows(text: str) -> Iterator[dict[str, str]]:
    """Yield the rows of all tables by column; lines between the tables are recognised by their different length."""
    header: list[str] = []
    for row in csv.reader(text.splitlines()):
        if "Total Time (ns)" in row:
            header = row
        elif header and len(row) == len(header):
            yield dict(zip(header, row, strict=True))
        else:
            header = []


def _nsys_kernel(row: dict[str, str]) -> KernelRow:
    return KernelRow(
        name=row["Name"],
        calls=int(_number(row["Instances"])),
        total_ns=int(_number(row["Total Time (ns)"])),
        mean_ns=_number(row["Avg (ns)"]),
        min_ns=int(_number(row["Min (ns)"])),
        max_ns=int(_number(row["Max (ns)"])),
    )


def _nsys_call(row: dict[str, str]) -> Operator:
    total_ns = int(_number(row["Total Time (ns)"]))
    return Operator(
        name=row["Name"],
        calls=int(_number(row["Num Calls"])),
        cpu_ns=total_ns,
        self_cpu_ns=total_ns,
        device_ns=0,
        self_device_ns=0,
    )


def _nsys_range(row: dict[str, str]) -> Range:
    return Range(
        name=row["Range"].removeprefix(":"),  # the part before the colon is the domain, which has no name here
        calls=int(_number(row["Instances"])),
        total_ns=int(_number(row["Total Time (ns)"])),
        mean_ns=_number(row["Avg (ns)"]),
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def compute(text: str, report: str) -> NsightCompute:
    """Return the kernels in the output of `ncu --csv --page=raw --print-units=base` by name, longest first.

    Raises Unsupported if there are none, or if a unit is not the base unit.
    """
    by_name: dict[str, list[KernelRow]] = {}
    for cells, units in _ncu_rows(text):
        launch = _ncu_launch(cells, units)
        by_name.setdefault(launch.name, []).append(launch)
    if not by_name:
        raise Unsupported(f"ncu counted no kernels{last_words(text)}")
    rows = map(_together, by_name.values())
    return NsightCompute(report=report, kernels=sorted(rows, key=lambda row: -row.total_ns))


def _ncu_rows(text: str) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Yield each launch's cells and units by column; the units are in the row below the header, which has no ID."""
    header: list[str] = []
    units: dict[str, str] = {}
    for row in csv.reader(text.splitlines()):
        if "Kernel Name" in row:
            header = row
        elif header and len(row) == len(header):
            cells = dict(zip(header, row, strict=True))
            if cells["ID"]:
                yield cells, units
            else:
                units = cells


def _ncu_launch(cells: dict[str, str], units: dict[str, str]) -> KernelRow:
    """Return one launch as a row; values that this GPU does not count are None."""
    for metric, known in _BASE_UNITS.items():
        if units.get(metric, known[0]) not in known:
            raise Unsupported(f"ncu reported {metric} in {units[metric]!r}, not in {known[0]}")
    ns = _counted(cells, _DURATION)
    if ns is None:
        raise Unsupported(f"ncu reported no {_DURATION} for {cells['Kernel Name']}")
    registers, *shared = (_counted(cells, metric) for metric in (_REGISTERS, *_SHARED))
    tensor = [count for count in (_counted(cells, metric) for metric in _TENSOR_CORES) if count is not None]
    return KernelRow(
        name=cells["Kernel Name"],
        calls=1,
        total_ns=round(ns),
        mean_ns=ns,
        min_ns=round(ns),
        max_ns=round(ns),
        registers=None if registers is None else int(registers),
        shared_bytes=None if None in shared else int(sum(count or 0 for count in shared)),
        theoretical_occupancy=_percent(cells, _THEORETICAL),
        measured_occupancy=_percent(cells, _MEASURED),
        limits=_limits(cells),
        tensor_cores=any(tensor) if tensor else None,
        tensor_cores_by="counters" if tensor else None,
    )


def _counted(cells: dict[str, str], metric: str) -> float | None:
    try:
        return _number(cells[metric])
    except (KeyError, ValueError):  # the column is absent or n/a, because this GPU does not count it
        return None


def _percent(cells: dict[str, str], metric: str) -> float | None:
    value = _counted(cells, metric)
    return None if value is None else value / 100


def _limits(cells: dict[str, str]) -> list[str]:
    """Return the resources that allow the fewest blocks per SM."""
    blocks = {word: _counted(cells, metric) for metric, word in _LIMITS.items()}
    known = {word: count for word, count in blocks.items() if count is not None}
    return [word for word, count in known.items() if count == min(known.values())]


def _together(launches: list[KernelRow]) -> KernelRow:
    """Return a kernel's launches as one row: occupancies weighted by time, and the longest launch's configuration."""
    total_ns = sum(launch.mean_ns for launch in launches)
    used = [launch.tensor_cores for launch in launches if launch.tensor_cores is not None]
    return msgspec.structs.replace(
        max(launches, key=lambda launch: launch.mean_ns),
        calls=len(launches),
        total_ns=round(total_ns),
        mean_ns=total_ns / len(launches),
        min_ns=min(launch.min_ns for launch in launches),
        theoretical_occupancy=mean((launch.theoretical_occupancy, launch.mean_ns) for launch in launches),
        measured_occupancy=mean((launch.measured_occupancy, launch.mean_ns) for launch in launches),
        tensor_cores=any(used) if used else None,
        tensor_cores_by="counters" if used else None,
    )


def last_words(output: str) -> str:
    """Return a program's last output lines, as the end of a sentence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f", saying: {' / '.join(lines[-3:])}" if lines else ""

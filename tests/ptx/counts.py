"""What the Triton kernels execute at the sizes of our models, and the least time that a GPU needs for it. Needs no GPU.

`python -m tests.ptx.counts docs/roofline.md` writes the tables of that page anew.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from benchd.kernels import shipped
from tests.ptx.races import WARP

FP32, SPECIAL, FP64, MATRIX, LOADS, STORES = "fp32", "special", "fp64", "matrix", "loads", "stores"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The peak rates of a GPU: `lanes` are per clock and multiprocessor, the matrix product is of half precision."""

    name: str
    multiprocessors: int
    clock_hz: float
    bytes_per_s: float
    matrix_flops_per_s: float
    lanes: dict[str, int]


# NVIDIA's data sheets of the modules, at their highest clocks; lanes per clock by the CUDA Programming Guide
GPUS = {
    87: Gpu(
        name="Jetson AGX Orin 64 GB",
        multiprocessors=16,
        clock_hz=1.3e9,
        bytes_per_s=204.8e9,
        matrix_flops_per_s=42.6e12,
        lanes={FP32: 128, SPECIAL: 16, FP64: 2},
    ),
    90: Gpu(
        name="H100 SXM",
        multiprocessors=132,
        clock_hz=1.98e9,
        bytes_per_s=3.35e12,
        matrix_flops_per_s=989e12,
        lanes={FP32: 128, SPECIAL: 16, FP64: 64},
    ),
}


@dataclass(frozen=True)
class Counted:
    """One launch of a kernel that ships: what it moved and executed in all, instructions as lanes.

    An element is a number of the largest tensor that it stores.
    """

    op: str
    kernel: str
    sm: int
    images: int
    elements: int
    loaded_bytes: int
    stored_bytes: int
    lanes: dict[str, int]
    matrix_flops: int

    def least_s(self) -> dict[str, float]:
        """Return the seconds by each limit of the architecture's GPU, none where we name no such GPU."""
        if (gpu := GPUS.get(self.sm)) is None:
            return {}
        clocks = gpu.multiprocessors * gpu.clock_hz
        return {
            "memory": (self.loaded_bytes + self.stored_bytes) / gpu.bytes_per_s,
            MATRIX: self.matrix_flops / gpu.matrix_flops_per_s,
            **{kind: self.lanes.get(kind, 0) / (lanes * clocks) for kind, lanes in gpu.lanes.items()},
        }


def count(sm: int, precisions: Sequence[str] = ("fp16", "fp32")) -> list[Counted]:
    """Return what the models' launches execute on an architecture, one of a kind, as they ship.

    It is for a process of its own.
    """
    from tests.ptx import session

    session.execute_as(sm)
    from tests.ptx import workloads  # it imports the kernels, which look once how they are to run

    ships = [(name.split(".")[-2], each) for name in shipped.modules() for each in import_module(name).SHIPPED]
    found: dict[tuple[str, str], Counted] = {}
    for batch, call in workloads.launches(precisions):

        def note(kernel, arguments, warps, executed, batch=batch):
            op, name = _name(ships, kernel, arguments, warps)
            found.setdefault((op, name), _counted(op, name, sm, batch, executed))

        session.COUNTED[:] = [(batch, note)]
        call()
    return [found[op, each.name] for op, each in ships if (op, each.name) in found]


def _name(ships, kernel, arguments, warps) -> tuple[str, str]:
    """Return the op and the name of what ships and was launched; raises StopIteration where that does not ship."""
    return next(
        (op, each.name)
        for op, each in ships
        if each.kernel is kernel and each.num_warps == warps and all(
            arguments[name] == (each.constants[name] if kind == "constexpr" else kind)
            for name, kind in each.signature.items() if kind == "constexpr" or kind.startswith("*")
        )
    )  # fmt: skip


def _counted(op: str, name: str, sm: int, batch: int, executed) -> Counted:
    lanes: Counter[str] = Counter()
    flops = 0
    for instruction, warps in zip(executed.program.instructions, executed.warps.tolist(), strict=True):
        kind = _kind(instruction.words)
        lanes["all"] += WARP * warps
        lanes[kind] += WARP * warps
        if kind == MATRIX:
            flops += 2 * warps * math.prod(map(int, re.findall(r"\d+", instruction.words[3])))  # m16n8k16
    loaded, stored = (sum(int(marks.sum()) * size for (_, size), marks in moved.items())
                      for moved in (executed.loaded, executed.stored))  # fmt: skip
    elements = max(int(marks.sum()) for marks in executed.stored.values())
    whole = {kind: round(executed.times * many) for kind, many in lanes.items()}
    elements, loaded, stored, flops = (round(executed.times * each) for each in (elements, loaded, stored, flops))
    return Counted(op, name, sm, batch, elements, loaded, stored, whole, flops)


def _kind(words: Sequence[str]) -> str:
    """Return what limits the rate of an instruction; approximations go to the special-function units."""
    name, kind = words[0], words[-1]
    if name in {"ld", "st"} and "global" in words:
        return LOADS if name == "ld" else STORES
    if name == "mma":
        return MATRIX
    if name in {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh"} or (name, kind) == ("div", "f32"):
        return SPECIAL
    if name in {"fma", "mul", "add", "sub"} and kind in {"f32", "f64"}:
        return FP32 if kind == "f32" else FP64
    return ""


def tables(rows: Iterable[Counted], compiled: Iterable[shipped.Compiled]) -> str:
    """Return the generated part of docs/roofline.md: what was counted, beside what was compiled."""
    usage = {(row.op, row.kernel, row.sm): row for row in compiled}
    pieces = [f"Made with Triton {shipped.triton_version()}."]
    for op, group in groupby(sorted(rows, key=lambda row: row.op), key=lambda row: row.op):
        headings = ["kernel", "sm", "images", "B in", "B out", *_COLUMNS, "at least us", "by", "registers", "shared"]
        lines = [headings, ["---"] * len(headings)]
        lines += [cells(row) + _compiled(usage[row.op, row.kernel, row.sm]) for row in group]
        pieces.append(f"## {op}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(pieces) + "\n"


_COLUMNS = (LOADS, STORES, FP32, SPECIAL, FP64, MATRIX, "all")


def cells(row: Counted) -> list[str]:
    """Return the cells of a row, those of its machine code aside."""
    an_element = [row.loaded_bytes, row.stored_bytes, *(row.lanes.get(kind, 0) for kind in _COLUMNS)]
    limit, seconds = max(row.least_s().items(), key=lambda each: each[1], default=("-", None))
    return [
        row.kernel,
        str(row.sm),
        str(row.images),
        *(f"{each / row.elements:.3g}" if each else "-" for each in an_element),
        "-" if seconds is None else f"{1e6 * seconds:.3g}",
        limit,
    ]


def _compiled(row: shipped.Compiled) -> list[str]:
    return [str(row.registers), f"{row.shared_bytes} B"]


def _write(page: Path) -> None:
    with get_context("spawn").Pool(len(shipped.EXECUTED)) as pool:  # a process is of one architecture for good
        rows = [row for each in pool.map(count, shipped.EXECUTED, chunksize=1) for row in each]
    written_by_hand = page.read_text().partition(shipped.GENERATED)[0]
    page.write_text(f"{written_by_hand}{shipped.GENERATED}\n{tables(rows, shipped.compile_all())}")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))

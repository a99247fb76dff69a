"""What each Triton kernel that ships compiles to, per GPU architecture: registers, spills, occupancy. Needs no GPU.

`python -m benchd.kernels.shipped docs/occupancy.md` writes the tables of that page anew.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module, metadata, util
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchd.kernels.occupancy import ARCHITECTURES, WARP_THREADS, theoretical

if TYPE_CHECKING:
    from benchd.kernels.launch import Shipped

GENERATED = "<!-- Below this line everything is written by `make occupancy`. -->\n"
EXECUTED = (75, 87, 90)  # whose PTX `make test-ptx` interprets; that of the others is compiled only
MOST_WORKERS = 4  # each holds a torch and a compiler of its own


class CannotCompile(RuntimeError):
    """The kernels cannot be compiled here, or one of them cannot be compiled at all; the message says why."""


@dataclass(frozen=True)
class Compiled:
    """One specialisation of an op's kernel, compiled for one architecture; traces show its `function`."""

    op: str
    kernel: str
    function: str
    sm: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    occupancy: float
    limits: tuple[str, ...]


def modules() -> list[str]:
    """Return the names of the modules that ship Triton kernels: those of the op folders which have one."""
    found = sorted(Path(__file__).parent.glob("*/triton_impl.py"))
    return [f"benchd.kernels.{path.parent.name}.triton_impl" for path in found]


def triton_version() -> str:
    """Return the version of Triton that is installed; raises CannotCompile where there is none."""
    if util.find_spec("triton") is None:
        raise CannotCompile("the package 'triton' is not installed")
    return metadata.version("triton")


def compile_all(
    names: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    architectures: Collection[int] = tuple(ARCHITECTURES),
) -> list[Compiled]:
    """Compile what the modules `names`, or else all of ours, ship; call `progress` with how many are done, of how many.

    It is done in processes of its own: in one that has TRITON_INTERPRET=1, kernels are interpreted and not compiled.
    """
    triton_version()
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, get_context("spawn"), _compile_for_real) as pool:
        found = pool.map(_jobs, modules() if names is None else names)
        jobs = [job for of_module in found for job in of_module if job.sm in architectures]
        rows = []
        for row in pool.map(_compile, jobs):
            rows.append(row)
            progress(len(rows), len(jobs))
    return rows


class _Job(NamedTuple):
    module: str
    position: int
    sm: int


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _shipped(module: str) -> "tuple[Shipped, ...]":
    return import_module(module).SHIPPED


def _jobs(module: str) -> list[_Job]:
    return [_Job(module, i, sm) for i, shipped in enumerate(_shipped(module)) for sm in shipped.architectures]


def _compile(job: _Job) -> Compiled:
    shipped, op = _shipped(job.module)[job.position], job.module.split(".")[-2]
    try:
        cubin, shared_bytes = _cubin(shipped, job.sm)
        registers, spilled_bytes = _usage(cubin)
    except Exception as error:
        raise CannotCompile(f"{op}: {shipped.name} for sm_{job.sm}: {error}") from error
    occupancy = theoretical(ARCHITECTURES[job.sm], registers, shared_bytes, shipped.num_warps * WARP_THREADS)
    return Compiled(
        op=op,
        kernel=shipped.name,
        function=shipped.kernel.__name__,
        sm=job.sm,
        warps=shipped.num_warps,
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=shared_bytes,
        occupancy=occupancy.share,
        limits=occupancy.limits,
    )


def _cubin(shipped: "Shipped", sm: int) -> tuple[bytes, int]:
    """Return the machine code, and the shared memory of a block in bytes: all that Triton uses is dynamic."""
    import triton  # noqa: PLC0415 - only a worker holds it, and never the interpreter
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    aligned = {(shipped.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in shipped.aligned}
    source = ASTSource(shipped.kernel, dict(shipped.signature), dict(shipped.constants), aligned)
    options = {"num_warps": shipped.num_warps, "enable_fp_fusion": shipped.fp_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, WARP_THREADS), options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of memory that stand in for those it does not get."""
    from triton import knobs  # noqa: PLC0415

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise CannotCompile(f"cuobjdump names no resource usage: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def page_tables(rows: Iterable[Compiled]) -> str:
    """Return the generated part of docs/occupancy.md."""
    pieces = [f"Made with Triton {triton_version()}.\n"]
    for op, group in groupby(rows, key=lambda row: row.op):
        pieces.append(_table(op, list(group)))
    return "\n".join(pieces)


def _table(op: str, rows: Sequence[Compiled]) -> str:
    architectures = sorted({row.sm for row in rows})
    headings = ["kernel", "warps", "shared", *(f"sm_{sm}" for sm in architectures)]
    lines = [f"## {op}", "", _executed(rows), "", _line(headings), _line(["---"] * len(headings))]
    for (kernel, warps), group in groupby(rows, key=lambda row: (row.kernel, row.warps)):
        cells = {row.sm: row for row in group}
        shared = max(row.shared_bytes for row in cells.values())
        lines.append(_line([kernel, str(warps), f"{shared} B", *(_cell(cells.get(sm)) for sm in architectures)]))
    return "\n".join(lines) + "\n"


def _executed(rows: Sequence[Compiled]) -> str:
    """Return which kernels are executed for which architectures, and for which they are only compiled."""
    functions = ", ".join(dict.fromkeys(f"`{row.function}`" for row in rows))
    architectures = sorted({row.sm for row in rows})
    run = ", ".join(f"sm_{sm}" for sm in architectures if sm in EXECUTED)
    rest = ", ".join(f"sm_{sm}" for sm in architectures if sm not in EXECUTED)
    return f"Executed as PTX at the tests' sizes: {functions} for {run}. Only compiled: {rest or 'none'}."


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(row: Compiled | None) -> str:
    if row is None:
        return "-"
    spilled = f", spills {row.spilled_bytes} B" if row.spilled_bytes else ""
    limits = f" {', '.join(row.limits)}" if row.occupancy < 1 else ""
    return f"{row.registers}{spilled}: {100 * row.occupancy:.0f} %{limits}"


def _write(page: Path) -> None:
    written_by_hand = page.read_text().partition(GENERATED)[0]
    page.write_text(f"{written_by_hand}{GENERATED}\n{page_tables(compile_all())}")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))

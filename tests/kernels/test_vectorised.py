"""What gcc makes of the C kernels where an ISA has no masks, on AVX2 and NEON: vectors, by its report and its code."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchd.kernels import compiler

pytestmark = pytest.mark.slow

# what Debian calls gcc on each machine, and the cross compiler elsewhere
COMPILERS = {
    "aarch64-linux-gnu-gcc": ("-mcpu=cortex-a76",),
    "x86_64-linux-gnu-gcc": ("-march=x86-64-v3",),
}
SOURCES = {path.parent.name: path for path in Path(__file__).parents[2].glob("kernels/*/native.c")}
CONTRACTION = {
    "add_rms_norm": compiler.FUSED,
    "causal_conv1d": compiler.FUSED,
    "exact_conv2d": compiler.EXACT,
    "lif": compiler.EXACT,
    "stbif": compiler.EXACT,
}


def lines(report, words):
    return {int(number) for number in re.findall(rf"native\.c:(\d+):\d+: {words}", report)}


@pytest.mark.parametrize("gcc", COMPILERS)
@pytest.mark.parametrize("op", [op for op, source in SOURCES.items() if "omp simd" in source.read_text()])
def test_a_marked_loop_is_vectors_in_all_its_copies(op, gcc, tmp_path):
    if shutil.which(gcc) is None:
        pytest.skip(f"needs {gcc} and its C library: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    flags = *compiler.FLAGS, *COMPILERS[gcc], *CONTRACTION[op], "-fopt-info-vec-all"
    command = [gcc, *flags, "-c", SOURCES[op], "-o", tmp_path / "kernel.o"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    vectors, scalars = lines(report, "optimized: loop vectorized"), lines(report, "missed: couldn't vectorize loop")
    for number, line in enumerate(SOURCES[op].read_text().splitlines(), 1):
        if "omp simd" in line:
            loop = {number + 1, number + 2}  # the report gives the line of the loop or of its body
            assert loop & vectors, line
            assert not loop & scalars, line


@pytest.mark.parametrize("number", [(), ("-DBF16",)], ids=["fp32", "bf16"])
def test_rows_of_tokens_move_in_whole_registers(number):
    """A load waits for two stores of halves until they are in the cache, which takes longer than a token's sums."""
    gcc = "x86_64-linux-gnu-gcc"
    if shutil.which(gcc) is None:
        pytest.skip(f"needs {gcc}")
    flags = *compiler.FLAGS, *COMPILERS[gcc], *compiler.FUSED, *number
    command = [gcc, *flags, "-S", "-o", "-", SOURCES["causal_conv1d"]]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "ymm" in code
    move = r"vmov(?:dq[au]|[au]ps)\s+"
    assert not re.findall(rf"{move}[^%\n]*\([^)]*\), (%xmm\d+)\n\s+{move}\1, [^%\n]*\(", code)

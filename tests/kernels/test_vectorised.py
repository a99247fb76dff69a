"""gcc turns the loops marked `omp simd` into vectors for 64-bit Arm too, by its own report; NEON has no masks."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchd.kernels import compiler

GCC = shutil.which("aarch64-linux-gnu-gcc")  # what Debian calls gcc on 64-bit Arm, and the cross compiler elsewhere
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


@pytest.mark.skipif(GCC is None, reason="needs apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
@pytest.mark.parametrize("op", [op for op, source in SOURCES.items() if "omp simd" in source.read_text()])
def test_a_marked_loop_is_vectors_in_all_its_copies(op, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    target = [flag.replace("native", "cortex-a76") for flag in compiler._target()]
    flags = *compiler.FLAGS, *target, *CONTRACTION[op], "-fopt-info-vec-all"
    command = [GCC, *flags, "-c", SOURCES[op], "-o", tmp_path / "kernel.o"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    vectors, scalars = lines(report, "optimized: loop vectorized"), lines(report, "missed: couldn't vectorize loop")
    for number, line in enumerate(SOURCES[op].read_text().splitlines(), 1):
        if "omp simd" in line:
            loop = {number + 1, number + 2}  # the report gives the line of the loop or of its body
            assert loop & vectors, line
            assert not loop & scalars, line

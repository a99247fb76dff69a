"""The occupancy calculator against NVIDIA's: a guide's example, worked values, and its own code where it is at hand."""

import ctypes
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchd.kernels.occupancy import ARCHITECTURES, KIB, theoretical

# sm, registers, shared bytes, threads, and the blocks by cuda_occupancy.h of CUDA 13.5
WORKED = [
    (75, 64, 0, 256, 4),
    (75, 40, 32768, 128, 2),
    (80, 128, 0, 256, 2),
    (86, 32, 0, 64, 16),
    (86, 32, 33000, 128, 3),
    (87, 64, 0, 64, 16),
    (87, 255, 0, 256, 1),
    (87, 168, 0, 384, 1),
    (87, 32, 166912, 128, 1),
    (87, 32, 166913, 128, 0),
    (89, 40, 0, 64, 24),
    (89, 24, 1000, 1024, 1),
    (90, 121, 0, 32, 16),
    (90, 72, 16384, 128, 7),
    (90, 40, 0, 160, 9),
    (90, 255, 0, 1024, 0),
    (90, 32, 232448, 1024, 1),
    (100, 48, 0, 128, 10),
    (110, 64, 0, 33, 16),
    (120, 32, 101376, 256, 1),
]


@pytest.mark.parametrize(("sm", "registers", "shared", "threads", "blocks"), WORKED)
def test_the_blocks_are_nvidia_s(sm, registers, shared, threads, blocks):
    assert theoretical(ARCHITECTURES[sm], registers, shared, threads).blocks == blocks


@pytest.mark.parametrize(
    ("registers", "threads", "percent", "limits"),
    [(50, 128, 75, ("registers",)), (44, 256, 83, ("registers",)), (116, 32, 33, ("blocks", "registers"))],
)
def test_a_scan_on_orin(registers, threads, percent, limits):
    occupancy = theoretical(ARCHITECTURES[87], registers, 0, threads)
    assert (round(100 * occupancy.share), occupancy.limits) == (percent, limits)


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "limits"),
    [
        (16, 0, 256, ("warps",)),
        (16, 0, 32, ("blocks",)),
        (128, 0, 256, ("registers",)),
        (16, 40 * KIB, 256, ("shared memory",)),
        (16, 0, 1025, ("warps",)),
        (256, 0, 32, ("registers",)),
        (16, 164 * KIB, 32, ("shared memory",)),
    ],
)
def test_the_limiting_resource_is_named(registers, shared, threads, limits):
    assert theoretical(ARCHITECTURES[87], registers, shared, threads).limits == limits


def test_a_block_without_threads_is_refused():
    with pytest.raises(ValueError, match="at least one thread"):
        theoretical(ARCHITECTURES[87], 32, 0, 0)


def test_the_calculator_loads_neither_torch_nor_triton():
    look = "import sys, benchd.kernels.occupancy; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.fixture(scope="module")
def nvidia_blocks(tmp_path_factory):
    """NVIDIA's calculator, from the header that GPU builds of torch bring along."""
    headers = [header for folder in sys.path for header in Path(folder).glob("nvidia/*/include/cuda_occupancy.h")]
    if not headers or not shutil.which("cc"):
        pytest.skip("needs a C compiler and cuda_occupancy.h, which comes with nvidia-cuda-runtime")
    library = tmp_path_factory.mktemp("nvidia") / "occupancy.so"
    source = Path(__file__).with_name("nvidia_occupancy.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-I", headers[0].parent, source, "-o", library], check=True)
    return ctypes.CDLL(str(library)).blocks


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_every_answer_is_that_of_nvidia_s_calculator(nvidia_blocks, sm):
    it = ARCHITECTURES[sm]
    facts = (*divmod(sm, 10), it.warps, it.shared_bytes, it.reserved_bytes)
    if nvidia_blocks(*facts, 32, 0, 32) < 0:
        pytest.skip(f"the installed cuda_occupancy.h does not know sm_{sm}")
    registers = [0, 1, 8, 9, *range(16, 256, 7), 255]
    shared = [0, 1, 512, 1000, 4096, 16384, 49152, 49153, 98304, 101376, 101377, 166912, 166913, 232448, 232449]
    threads = [1, 32, 33, 64, 96, 128, 160, 256, 384, 640, 1024, 1025]
    for kernel in itertools.product(registers, shared, threads):
        assert theoretical(it, *kernel).blocks == nvidia_blocks(*facts, *kernel), kernel

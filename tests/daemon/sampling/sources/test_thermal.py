import os
import shutil
import subprocess
import sys

import pytest
from boards_read import available, read
from jetson_trees import BOARDS, build
from machines import desktop, write

from benchd.daemon.sampling.sources.thermal import Thermal

ZONES = "sys/devices/virtual/thermal"
GPU = f"{ZONES}/thermal_zone1/temp"


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_each_zone_that_has_a_temperature(board, tmp_path):
    sampler = available(Thermal(build(tmp_path, board)))
    assert {(sample.metric, sample.source) for sample in sampler.sample()} == {("zone_temp_c", "thermal")}
    celsius, error = read(sampler)
    assert celsius == {zone: value / 1e3 for zone, value in board.zones.items() if value is not None}
    assert error is None


def test_zones_of_one_type_stay_apart(tmp_path):
    for number, kind in ((0, "acpitz"), (2, "x86_pkg_temp"), (10, "acpitz")):
        write(tmp_path / ZONES / f"thermal_zone{number}", {"type": f"{kind}\n", "temp": f"{20 + number}000\n"})
    assert read(available(Thermal(tmp_path)))[0] == {"acpitz": 20.0, "x86_pkg_temp": 22.0, "acpitz-10": 30.0}


@pytest.mark.parametrize("content", ["", "garbage", "-256000", "200000"])
def test_a_zone_that_fails_is_named_and_the_others_go_on(content, nano):
    sampler = available(Thermal(nano))
    before, _ = read(sampler)
    write(nano, {GPU: f"{content}\n"})
    celsius, error = read(sampler)
    assert celsius.keys() == before.keys() - {"gpu-thermal"}
    assert "zone gpu-thermal" in error


KERNEL = """
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static ssize_t answered(ssize_t count, const void *buffer)
{
    if (count < 3 || memcmp(buffer, "off", 3))
        return count;
    errno = EAGAIN;
    return -1;
}

ssize_t read(int fd, void *buffer, size_t size) { return answered(syscall(SYS_read, fd, buffer, size), buffer); }

ssize_t pread64(int fd, void *buffer, size_t size, off_t offset)
{
    return answered(syscall(SYS_pread64, fd, buffer, size, offset), buffer);
}

ssize_t pread(int fd, void *buffer, size_t size, off_t offset) { return pread64(fd, buffer, size, offset); }
"""


@pytest.fixture
def under_firmware(nano, tmp_path):
    """Return what runs a program on a board whose GPU is off, and returns the words that it prints."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler for reads that answer as Tegra's firmware does")
    write(tmp_path, {"kernel.c": KERNEL, GPU: "off\n"})
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "kernel.c", "-o", tmp_path / "kernel.so"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(tmp_path / "kernel.so")}

    def run(program):
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    return run


def test_a_unit_that_is_off_is_no_error_and_is_seen_when_it_comes_on(nano, under_firmware):
    look = f"""
from pathlib import Path
from benchd.daemon.sampling.sources.thermal import Thermal
sampler = Thermal(Path({str(nano)!r}))
assert sampler.unavailable() is None
for state in ("off", "44531", "off"):
    Path({str(nano / GPU)!r}).write_text(state)
    print([sample.value for sample in sampler.sample() if sample.rail == "gpu-thermal"])
"""
    assert under_firmware(look) == ["[]", "[44.531]", "[]"]


def test_a_machine_without_zones(tmp_path):
    assert "no thermal zone" in Thermal(desktop(tmp_path)).unavailable()

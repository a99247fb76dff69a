"""Our use of TensorRT against its real bindings, 10.3 and 11: `make test-tensorrt`.

BENCHD_TENSORRT_WHEELS names a folder of the bindings' wheels; those that are missing are downloaded into it. Their
libraries are stubs, so neither a GPU nor TensorRT itself takes part; see `tensorrt_driven.py`.
"""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tensorrt_stub import compile_libraries

pytestmark = pytest.mark.tensorrt
DRIVEN = Path(__file__).with_name("tensorrt_driven.py")
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
VERSIONS = {10: "10.3.0", 11: "11.*"}


@pytest.fixture(scope="module")
def wheels() -> Path:
    """The folder of wheels."""
    if "BENCHD_TENSORRT_WHEELS" not in os.environ:
        pytest.skip("make test-tensorrt runs it")
    if platform.machine() != "x86_64" or shutil.which("cc") is None:
        pytest.skip("needs x86-64, for which there are bindings of 10.3, and a C compiler")
    folder = Path(os.environ["BENCHD_TENSORRT_WHEELS"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wheel(folder: Path, major: int) -> Path:
    """Return the wheel of this version for this Python, downloaded where it is not there."""
    pattern = f"tensorrt_cu12_bindings-{VERSIONS[major]}-{PYTHON}-*.whl"
    if not list(folder.glob(pattern)):
        package = f"tensorrt-cu12-bindings=={VERSIONS[major]}"
        options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "15", "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, package]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no bindings of TensorRT {VERSIONS[major]} here: {done.stderr.strip().splitlines()[-1]}")
    return max(folder.glob(pattern))


@pytest.mark.parametrize("major", VERSIONS)
def test_what_we_use_of_tensorrt_holds_in_its_real_bindings(wheels, major, tmp_path, child_environment):
    zipfile.ZipFile(wheel(wheels, major)).extractall(tmp_path)
    compile_libraries(tmp_path, major)
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(DRIVEN)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=child_environment | paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

"""Our use of TensorRT against its real bindings: JetPack 6's, JetPack 7.2's and 11: `make test-tensorrt`.

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
VERSIONS = ("10.3.0", "10.16.*", "11.*")


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


def wheel(folder: Path, version: str) -> Path:
    """Return the wheel of this version for this Python, downloaded where it is not there."""
    pattern = f"tensorrt_cu12_bindings-{version}-{PYTHON}-*.whl"
    if not list(folder.glob(pattern)):
        package = f"tensorrt-cu12-bindings=={version}"
        options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "15", "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, package]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no bindings of TensorRT {version} here: {done.stderr.strip().splitlines()[-1]}")
    return max(folder.glob(pattern))


@pytest.mark.parametrize("version", VERSIONS)
def test_what_we_use_of_tensorrt_holds_in_its_real_bindings(wheels, version, tmp_path, child_environment):
    zipfile.ZipFile(wheel(wheels, version)).extractall(tmp_path)
    compile_libraries(tmp_path, int(version.partition(".")[0]))
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(DRIVEN)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=child_environment | paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

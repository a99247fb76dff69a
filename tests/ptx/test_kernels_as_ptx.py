"""The kernels' own tests on the PTX that Triton emits for each architecture, and who notices where it is changed."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", "3.8", reason="the interpreter launches kernels as Triton 3.8 does")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*arguments):
    """Run tests in a process of their own, which has no other use for Triton; return what it said at the end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.ptx.session", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    return done.stdout


def test_a_compiled_kernel_is_executed():
    output = run("--ptx", "87", "tests/kernels/add_rms_norm", "-k", "triton and halves and float16")
    assert "4 passed" in output


@pytest.mark.parametrize("sm", [75, 87, 90, 110])
def test_the_kernels_pass_as_they_are_compiled(sm, tmp_path):
    launched = tmp_path / "launched"
    run("--ptx", str(sm), "-n", "2", "--launched", str(launched), "tests/kernels", "-k", "triton")
    assert _kernels() <= set(launched.read_text().split())


def _kernels():
    """Return the functions that are launched, with their modules."""
    modules = [f"benchd.kernels.{path.parent.name}.triton_impl" for path in ROOT.glob("kernels/*/triton_impl.py")]
    return {
        f"{module}.{name}" for module in modules for name in vars(import_module(module)) if name.endswith("_kernel")
    }

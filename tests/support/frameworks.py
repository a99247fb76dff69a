"""Spiking frameworks and NeuroBench for comparisons: `make test-neurobench` and `make test-nir`.

BENCHD_SPIKING names a folder that they are installed into where they are absent, without what they depend on: much of
that is for audio, data sets and GPUs, which nothing here needs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = (
    *("neurobench==2.3.0", "snntorch==1.0.0", "norse==1.1.0", "spikingjelly==2.0.0"),
    *("nir==1.0.8", "nirtorch==2.6", "loguru", "tqdm"),
)


def require():
    """Make the packages importable, or skip the test."""
    if "BENCHD_SPIKING" not in os.environ:
        pytest.skip("make test-neurobench and make test-nir run it")
    folder = Path(os.environ["BENCHD_SPIKING"]).absolute()
    if not (folder / "nirtorch").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
        subprocess.run(command, check=True)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

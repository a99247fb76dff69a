"""What every test on a GPU needs: float32 that is computed in float32, our commands, and the verdict at the end."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu_verdict import (  # noqa: F401 - hooks
    pytest_collection_modifyitems,
    pytest_report_header,
    pytest_terminal_summary,
    pytest_xdist_auto_num_workers,
)
from waiting import WAIT_S

from benchd.daemon.machine import lock


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    # cuDNN takes it by default, and its ten bits are worse than the tolerances here; a worker turns it off too
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    yield
    products.allow_tf32, convolutions.allow_tf32 = before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a module's commands run."""
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def command(folder: Path) -> Callable[..., str]:
    """Return a function that runs one of our programs to its success in `folder` and returns what it printed."""
    (folder / "locks").mkdir()
    own = {"XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", lock.FOLDER_VARIABLE: "locks"}
    environment = os.environ | {name: str(folder / where) for name, where in own.items()}

    def run(program: str, *arguments: str) -> str:
        line = [Path(sys.executable).parent / program, *arguments]
        done = subprocess.run(
            line, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run

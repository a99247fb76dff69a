"""What a process that runs tests does with torch: it fixes threads, fills buffers, forks workers, skips GPU tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import workers_forked

TESTS = Path(__file__).parents[1]
NEEDS_GPU = pytest.mark.skip(reason="no CUDA device")
# Triton reads it when it is first imported: without a GPU, kernels run in its interpreter
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        # the libraries of a GPU warn of what is no error of ours: it is shown, and only our own use of old names fails
        for line in ("default", r"error::DeprecationWarning:benchd\.", r"error::FutureWarning:benchd\."):
            config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(NEEDS_GPU)


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    # sums are split by thread: a count of the machine's own, or of the test before, would make results differ
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _unwritten_memory_shows(request: pytest.FixtureRequest) -> Iterator[None]:
    # fresh buffers hold NaN under deterministic algorithms, which some CUDA operations lack
    kernels = "kernels" in request.path.relative_to(TESTS).parts
    if kernels and request.node.get_closest_marker("gpu") is None:
        torch.use_deterministic_algorithms(mode=True)
    yield
    if torch.are_deterministic_algorithms_enabled():  # asking is cheap, while a change imports torch's compiler
        torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(autouse=True)
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # a test that is not about how a worker begins is spared its import of torch; CUDA does not outlive a fork
    if not torch.cuda.is_available():
        workers_forked(monkeypatch)

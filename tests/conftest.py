"""What every test may need: fixed threads, buffers of NaN, an environment for children, a broker, a small disk."""

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from broker import RunningBroker, running_broker
from disks import tmpfs
from forked import onnx_table_kept, workers_apart
from hypothesis import HealthCheck, settings

from benchd.daemon.machine import folders, lock

# torch and thousands of tests stay to the end: looking for garbage among them takes nearly a third of the collection
gc.disable()
# cuBLAS reads it when a handle is made: without it products refuse the deterministic algorithms asked for below
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# a busy machine is slow, not wrong
settings.register_profile("benchd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("benchd")

OURS = (
    "BENCHD_",
    "CUBLAS_WORKSPACE_CONFIG",
    "TRITON_INTERPRET",
    "PYTHONPATH",
    "STATE_DIRECTORY",
    "CACHE_DIRECTORY",
)


# its names are digests of everything that it was made from: tests share it with each other and with the next run
COMPILED = {name: folders.cache().with_name("benchd-tests") / name for name in ("native", "inductor", "tmp")}
# tests here wait for processes, browsers and brokers; those of the other folders compute
WAITING = (
    "tests/e2e/",
    "tests/soak/",
    "tests/dashboard/",
    "tests/daemon/service/",
    "tests/daemon/delivery/",
    "tests/test_",
)


def pytest_configure(config: pytest.Config) -> None:
    # the process that starts others to run the tests needs no torch, which it would import before they begin
    if not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("beside_torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-each", action="store_true", help="run the first case of each parametrized test only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("one_each"):
        firsts = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        others = set(items).difference(firsts.values())
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    _mix(items)


def _mix(items: list[pytest.Item]) -> None:
    """Sort files so that those that wait and those that compute take turns: four workers then keep two cores busy."""
    files = {item.path: item.nodeid.startswith(WAITING) for item in items}
    groups = ([path for path in files if files[path] is waits] for waits in (True, False))
    places = {path: place / len(group) for group in groups for place, path in enumerate(group)}
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    onnx_table_kept()
    # a worker's stages, which run here too, collect before they measure
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _lasting_objects() -> None:
    # what the tests before imported stays too, and a run in this process searches for garbage before it measures
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("locks")


@pytest.fixture(autouse=True)
def _own_machine_lock(_locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # neither a test beside this one nor a benchd that measures this machine keeps it waiting
    monkeypatch.setenv(lock.FOLDER_VARIABLE, tempfile.mkdtemp(dir=_locks))


@pytest.fixture
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker of the test is an interpreter of its own, as the product starts it."""
    workers_apart(monkeypatch)


@pytest.fixture
def child_environment(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a started command: state, caches and lock of the test's own, no setting of the caller's.

    Only what compilers made is shared, in a folder of the tests.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    cache = tmp_path_factory.mktemp("cache")
    (cache / "benchd").mkdir()
    for name, folder in COMPILED.items():
        folder.mkdir(parents=True, exist_ok=True)
        (cache / "benchd" / name).symlink_to(folder)
    folders = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(cache)}
    return {**inherited, **folders, lock.FOLDER_VARIABLE: os.environ[lock.FOLDER_VARIABLE]}


@pytest.fixture
def printed(tmp_path: Path, child_environment: dict[str, str]) -> Callable[..., str]:
    """Return what a Python prints that runs `code`, with the modules in the test's folder before all others."""

    def run(code: str, **variables: str) -> str:
        paths = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
        environment = child_environment | paths | variables
        command = [sys.executable, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    return run


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """One broker for the whole run: `host`, `port`, `url`. A test that kills its broker starts one of its own."""
    with running_broker(tmp_path_factory.mktemp("mosquitto")) as broker:
        yield broker


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with tmpfs(tmp_path / "disk", "size=4m") as folder:
        yield folder

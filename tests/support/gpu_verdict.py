"""The verdict of `make test-gpu`: hooks of pytest that say how long it takes and, last, what of the GPU is right.

A test belongs to the area that its marker names, and one of a kernel to `kernels` if a GPU runs it. An area is wrong if
any of its tests failed, and not tested if none of them ran; the table then says why.
"""

import os
import time
from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch

from benchd.exporters.tegra import is_tegra

AREAS = (
    "kernels",
    "models",
    "graphs",
    "onnxruntime",
    "tensorrt",
    "nvml",
    "energy",
    "occupancy",
    "profile",
    "bench-once",
)
WORKER_BYTES = 8 * 2**30  # of a GPU's memory for each process of tests
LASTED = "gpu/lasted_s"
FIRST = "no run of this machine is known: expect 10 to 30 minutes, since engines and Triton kernels are built first"

_begun_s = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note the area of each test where a report keeps it, also one from another process."""
    for item in items:
        area = _area(item)
        if area:
            item.user_properties.append(("area", area))


def _area(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("area")
    if marker:
        return str(marker.args[0])
    on_gpu = torch.cuda.is_available() or item.get_closest_marker("gpu")
    return "kernels" if on_gpu and "kernels" in item.path.parts else None


def pytest_report_header(config: pytest.Config) -> str:
    """Say how long the tests will take, by the last time."""
    cache = getattr(config, "cache", None)  # not with -p no:cacheprovider
    lasted_s = cache.get(LASTED, None) if cache else None
    return f"duration: {FIRST if lasted_s is None else f'{lasted_s / 60:.0f} min the last time'}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return as many processes as fit the GPU's memory; a Jetson has one memory for all."""
    if is_tegra() or not torch.cuda.is_available():
        return 1 if is_tegra() else None
    memory = torch.cuda.get_device_properties(0).total_memory
    return max(1, min(os.cpu_count() or 1, memory // WORKER_BYTES))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None, None, None]:
    """Write the table behind all else."""
    yield
    cache = getattr(terminalreporter.config, "cache", None)
    if cache and torch.cuda.is_available():
        cache.set(LASTED, time.monotonic() - _begun_s)
    terminalreporter.section("verdict")
    by_area = verdicts(terminalreporter.stats)
    width = max(map(len, by_area))
    for area, (verdict, why) in by_area.items():
        terminalreporter.write_line(f"{area:<{width}}  {verdict:<10}  {why}")


def verdicts(stats: dict[str, Sequence[Any]]) -> dict[str, tuple[str, str]]:
    """Return each area's verdict and what it rests on, from pytest's reports by outcome."""
    wrong = {area: [*_of(area, stats, "failed"), *_of(area, stats, "error")] for area in AREAS}
    by_area = {area: _verdict(wrong[area], _of(area, stats, "passed"), _of(area, stats, "skipped")) for area in AREAS}
    unread = [report.nodeid for report in stats.get("error", []) if not _area_of(report)]
    return by_area | dict.fromkeys(unread, ("wrong", "it cannot be collected"))


def _of(area: str, stats: dict[str, Sequence[Any]], outcome: str) -> list[Any]:
    return [report for report in stats.get(outcome, []) if _area_of(report) == area]


def _area_of(report: Any) -> str | None:
    return dict(getattr(report, "user_properties", ())).get("area")


def _verdict(wrong: Sequence[Any], right: Sequence[Any], skipped: Sequence[Any]) -> tuple[str, str]:
    reasons = "; ".join(dict.fromkeys(report.longrepr[2].removeprefix("Skipped: ") for report in skipped))
    if wrong:
        names = sorted({report.nodeid for report in wrong})
        more = f" and {len(names) - 1} more" if names[1:] else ""
        return "wrong", f"{names[0]}{more}"
    if right:
        left_out = f"; {len(skipped)} not tested because {reasons}" if skipped else ""
        return "right", f"{len(right)} tests{left_out}"
    return "not tested", f"because {reasons or 'no test of it was chosen'}"

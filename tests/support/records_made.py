"""A small complete Record for tests that need one, and those that a command has written."""

from pathlib import Path
from typing import Any

from benchd.daemon import journal
from benchd.daemon.delivery.messages import Info
from benchd.daemon.records import (
    Accuracy,
    BlockStatistics,
    Case,
    Check,
    Energy,
    Environment,
    Floor,
    ModelFacts,
    ProcessResult,
    Record,
    Requests,
    Timing,
    decode,
)
from benchd.daemon.verdicts.accuracy import counted

ENVIRONMENT = Environment(
    fingerprint="f",
    machine="x86_64",
    os="Debian",
    kernel="6.1",
    board=None,
    soc=None,
    cpu_model="cpu",
    cpu_count=2,
    cpu_governor=None,
    cpu_max_hz=None,
    memory_bytes=2**34,
    device="cpu",
    gpu=None,
    driver=None,
    power_mode=None,
    clocks_locked=None,
    threads=2,
)
INFO = Info(
    device_id="d",
    boot_id="b",
    name="",
    site="",
    tags=[],
    tool_version="1",
    environment=ENVIRONMENT,
    suites=[],
    catalogue_sha256="",
    t_wall="",
)
ENERGY = Energy(
    energy_j=20.0,
    energy_err_j=1.0,
    gross_per_inference_j=0.5,
    scope="module",
    source="ina3221",
    sensor_period_s=0.1,
    updates=100,
)
WRONG = Check(
    passed=False,
    rule="outputs",
    images=8,
    max_abs_error=1.0,
    error_share=1.0,
    tolerance=1e-4,
    argmax_disagreements=8,
)
QANN = ModelFacts(
    options={"level": 8, "width": 16},
    input_shape=[3, 32, 32],
    inputs=[],
    parameters=1,
    weights="qann.safetensors",
    weights_sha256="a",
    read={"benchd": "c"},
    data="demo",
)

PASSED = Check(
    passed=True, rule="outputs", images=8, max_abs_error=0, error_share=0, tolerance=1, argmax_disagreements=0
)


def timing(median_ms: float = 5.0, **fields: Any) -> Timing:
    """Return a Timing of 700 runs around `median_ms`."""
    given: dict[str, Any] = {
        "low_ms": median_ms * 0.99,
        "high_ms": median_ms * 1.01,
        "mean_ms": median_ms,
        "min_ms": median_ms * 0.9,
        "max_ms": median_ms * 1.5,
        "runs": 700,
    }
    return Timing(median_ms=median_ms, **given | fields)


def blocks(medians_ms: list[float], **fields: Any) -> BlockStatistics:
    """Return the statistics of blocks with these medians that ended at the cap, `fields` replaced."""
    given: dict[str, Any] = {"lag1": None, "doublings": 0, "half_width": None, "converged": False, "stop_reason": "cap"}
    return BlockStatistics(count=len(medians_ms), runs_per_block=1, medians_ms=medians_ms, **given | fields)


def floor(**fields: Any) -> Floor:
    """Return a Floor of 2.5 ms that the bytes bound, `fields` replaced."""
    times: dict[str, Any] = {"floor_ms": 2.5, "bound_by": "bytes", "matrix_ms": 1.0, "bytes_ms": 2.5}
    costs = dict.fromkeys(("matrix_flops", "elementwise_flops", "bytes", "parameters_bytes", "exponentials"), 1)
    return Floor(**times | {"exponentials_ms": 0.0} | costs | fields)


def requests(*, asked: int = 1000, late: int = 0, dropped: int = 0, **fields: Any) -> Requests:
    """Return what became of requests at 30 per second that met their deadline, `fields` replaced."""
    counts = {"asked": asked, "answered": asked - late - dropped, "late": late, "dropped": dropped}
    given: dict[str, Any] = {"rate_hz": 30.0, "met": True, "arrivals_p": 0.5, "noticed_ms": 0.1, "busy_share": 0.5}
    return Requests(**counts, **given | fields)


def accuracy(*, right: int = 50, gained: int = 0, lost: int = 0, images: int = 100) -> Accuracy:
    """Return an Accuracy of these counts."""
    data = f"{images} of the {images} images of imagefolder:images"
    return counted(right=right, gained=gained, lost=lost, images=images, data=data, data_sha256="ab" * 32)


def made(**fields: Any) -> Record:
    """Return a Record of `vim_tiny` on eager with one process of its timing, `fields` replaced."""
    case, of_all = fields.pop("case", Case(model="vim_tiny")), fields.get("timing", timing())
    given: dict[str, Any] = {
        "run_id": "r1",
        "suite_id": "s1",
        "device_id": "bench-abc123",
        "case_id": case.case_id,
        "case": case,
        "status": "ok",
        "t_wall": "2026-01-01T00:00:00.000Z",
        "t_mono_ns": 1,
        "boot_id": "b1",
        "tool_version": "0.1.0",
        "environment": ENVIRONMENT,
        "timing": of_all,
        "processes": [ProcessResult(status="ok", timing=of_all or timing())],
    }
    return Record(**given | fields)


def written(folder: Path) -> list[Record]:
    """Return the records that a command has written to `out` in this folder."""
    path = folder / "out" / "records.jsonl"
    return [decode(line) for line in journal.read(path)] if path.exists() else []

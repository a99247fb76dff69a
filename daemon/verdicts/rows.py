"""Flattens a record into one row, which provides the columns of CSV, Markdown, the dashboard and `latest`."""

from collections.abc import Sequence
from typing import Any

from benchd.daemon.records import OptionValue, Record
from benchd.daemon.verdicts.figures import energy_error_share, latency_ms, median_ms, memory_mib, power_w
from benchd.daemon.verdicts.timings import disturbed

Cell = str | float | bool | None
Row = dict[str, Cell]


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four are fullwidth


def row(record: Record) -> Row:
    """Return the record as one flat row; a value that was not measured is None."""
    case, timing, check = record.case, record.timing, record.check
    environment, energy, accuracy = record.environment, record.energy, record.accuracy
    load, requests = case.load, record.requests
    disturbance = disturbed(record.processes)
    return {
        "device_id": record.device_id,
        "device": environment.gpu if environment.device == "cuda" else environment.cpu_model,
        "power_mode": environment.power_mode,
        "clocks_locked": environment.clocks_locked,
        "fingerprint": environment.fingerprint,
        "suite_id": record.suite_id,
        "run_id": record.run_id,
        "case_id": record.case_id,
        "t_wall": record.t_wall,
        "tool_version": record.tool_version,
        "preset": record.preset,
        "model": case.model,
        "variant": case.variant.label,
        "kernels_ran": record.kernels_ran,
        "provider": case.provider if case.dla is None else f"dla {case.dla}",
        "batch_size": case.batch_size,
        "options": _options(case.options),
        "direction": case.direction,
        "scenario": case.scenario,
        "seed": case.seed,
        "threads": environment.threads,
        "status": record.status,
        "reason": record.reason,
        "median_ms": median_ms(record),
        **_fields(timing, "low_ms", "high_ms", "p99_ms", "p999_ms"),
        "disturbed_blocks": disturbance.disturbed if disturbance else 0,
        **_fields(disturbance, "clean_ms", "as_experienced_ms"),
        "latency_upper_ms": latency_ms(record),
        **_fields(timing, "runs"),
        "streams": case.streams,
        "rate_hz": requests.rate_hz if requests else load.rate_hz if load else None,
        **_fields(load, "queue", "deadline_ms", "percentile"),
        "deadline_met": requests.met if requests else None,
        "requests": requests.asked if requests else None,
        **_fields(requests, "late", "dropped", "arrivals_p", "noticed_ms"),
        "beside": case.beside.case_id if case.beside else None,
        "beside_rate_hz": case.beside.rate_hz if case.beside else None,
        **_fields(record.beside, "releases", "misses", prefix="beside_"),
        "throughput_per_s": record.throughput_per_s,
        "energy_per_inference_j": energy.gross_per_inference_j if energy else None,
        "energy_error_share": energy_error_share(energy),
        "power_w": power_w(record),
        "memory_mib": memory_mib(record),
        "check": check.verdict if check else None,
        "check_error_share": check.error_share if check else None,
        "agreement": check.agreeing / check.decided if check and check.agreeing is not None and check.decided else None,
        **_fields(
            accuracy, "metric", "value", "low", "high", "drop", "drop_low", "drop_high", "images", prefix="accuracy_"
        ),
        "x_of_floor": record.x_of_floor,
        "bound_by": record.floor.bound_by if record.floor else None,
        "flags": " ".join(record.flags),
    }


def _fields(part: object, *names: str, prefix: str = "") -> Row:
    """Return these fields of a part of a record; all are None if the record lacks the part."""
    return {prefix + name: None if part is None else getattr(part, name) for name in names}


def spreadsheet(value: Cell) -> Cell:
    """Return a cell for CSV, quoted if a spreadsheet would interpret it as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _options(options: dict[str, OptionValue]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(options.items()))


def columns(record: Record, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the named columns that a row has; energy is also available in millijoules."""
    flat: dict[str, Any] = {"energy_mj": None, "energy_err_mj": None} | row(record)
    if flat["energy_per_inference_j"] is not None:
        flat["energy_mj"] = 1e3 * flat["energy_per_inference_j"]
        share = flat["energy_error_share"]
        flat["energy_err_mj"] = None if share is None else share * flat["energy_mj"]
    return {name: flat[name] for name in names if name in flat}

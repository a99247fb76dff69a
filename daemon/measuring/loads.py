"""The streams and the server load of a suite, and checks for invalid combinations."""

import math
import re
from collections.abc import Sequence
from typing import Any

from benchd.daemon.config import Suite
from benchd.daemon.errors import UsageError
from benchd.daemon.records import PERCENTILE, QUEUE, WITH_STREAMS, Load, Scenario, Variant

MOST_HZ = 1e6
LONGEST_MS = 1e9
LEAST_PER_HOUR = 10
MOST_QUEUED = 100_000
MOST_STREAMS = 64
CUDA_STREAMS = 32  # the size of torch's pool: the 33rd stream is the first one again (c10/cuda/CUDAStream.h)
CAPTURES = 2  # of a model as CUDA graphs, each on its own CUDA stream, because cuBLAS keeps one workspace per stream
LOWEST_PERCENTILE, HIGHEST_PERCENTILE = 50.0, 99.99


def refuse(suite: Suite) -> None:
    """Raise UsageError for invalid streams or an invalid load, and for a load without a server."""
    _refuse_streams(suite)
    if suite.beside and "cold_start" in suite.scenarios:
        raise UsageError("--beside cannot be used with --scenario cold_start, which ends before a neighbour matters")
    given = {
        "--rate": bool(suite.rates_hz),
        "--find-rate": suite.find_rate,
        "--deadline": suite.deadline_ms is not None,
        "--percentile": suite.percentile is not None,
        "--queue": suite.queue is not None,
    }
    stray = next((name for name, is_given in given.items() if is_given), None)
    if "server" not in suite.scenarios:
        if stray:
            raise UsageError(f"{stray} needs --scenario server")
        return
    if suite.find_rate and suite.rates_hz:
        raise UsageError("--rate and --find-rate: give only one of them")
    if suite.find_rate and suite.deadline_ms is None:
        raise UsageError("--find-rate: also give the deadline to meet, such as --deadline 33ms")
    if not (suite.find_rate or suite.rates_hz):
        raise UsageError("--scenario server: give --rate 30 (requests per second), or --find-rate with --deadline 33ms")
    _refuse_values(suite)


def _refuse_streams(suite: Suite) -> None:
    for streams in suite.streams:
        if not 1 <= streams <= MOST_STREAMS:
            raise UsageError(f"--streams {streams}: must be at least 1 and at most {MOST_STREAMS}")
    if all(streams == 1 for streams in suite.streams):
        return
    if suite.directions == ["training"]:
        raise UsageError("--streams: for inference only; omit --direction training")
    other = next((scenario for scenario in suite.scenarios if scenario not in WITH_STREAMS), None)
    if other:
        raise UsageError(f"--streams: with --scenario {' or '.join(WITH_STREAMS)}, not {other}")


def _refuse_values(suite: Suite) -> None:
    """Raise UsageError for a value out of range, shown unrounded, because a rounded one might be within range."""
    for rate_hz in suite.rates_hz:
        if not 0 < rate_hz <= MOST_HZ:
            raise UsageError(f"--rate {rate_hz:.15g}: must be above 0 and at most {MOST_HZ:,.0f} requests per second")
        if 3600 * rate_hz < LEAST_PER_HOUR:
            least_hz = math.ceil(1e4 * LEAST_PER_HOUR / 3600) / 1e4
            raise UsageError(
                f"--rate {rate_hz:.15g}: {LEAST_PER_HOUR} requests take longer than an hour; give at least "
                f"{least_hz:g} per second, or measure a single request after a pause with --scenario wake_up"
            )
    if suite.deadline_ms is not None and not 0 < suite.deadline_ms <= LONGEST_MS:
        raise UsageError(f"--deadline {suite.deadline_ms:.15g}ms: must be above 0 and at most {LONGEST_MS:,.0f} ms")
    if suite.percentile is not None and not LOWEST_PERCENTILE <= suite.percentile <= HIGHEST_PERCENTILE:
        raise UsageError(
            f"--percentile {suite.percentile:.15g}: must be from {LOWEST_PERCENTILE:g} to {HIGHEST_PERCENTILE:g}"
        )
    if suite.queue is not None and not 1 <= suite.queue <= MOST_QUEUED:
        raise UsageError(f"--queue {suite.queue}: must be at least 1 and at most {MOST_QUEUED:,} waiting requests")


def most_on_gpu(variant: Variant) -> int:
    """Return how many streams of this variant can each have their own CUDA streams."""
    return CUDA_STREAMS // (CAPTURES if variant.backend == "cudagraph" else 1)


def of(suite: Suite, scenario: Scenario) -> Sequence[Load | None]:
    """Return the loads of a suite's cases in this scenario, [None] unless it is a server."""
    if scenario != "server":
        return [None]
    percentile = PERCENTILE if suite.percentile is None else suite.percentile
    queue = QUEUE if suite.queue is None else suite.queue
    rates_hz: list[float] | list[None] = [None] if suite.find_rate else suite.rates_hz
    return [
        Load(rate_hz=rate_hz, deadline_ms=suite.deadline_ms, percentile=percentile, queue=queue) for rate_hz in rates_hz
    ]


def named(parts: dict[str, str]) -> dict[str, Any]:
    """Remove the rate and the deadline from the parts of a case_id, and return them as fields of a suite."""
    settings: dict[str, Any] = {"deadline_ms": parts.pop("deadline")} if "deadline" in parts else {}
    rate = parts.pop("rate", None)
    if rate == "highest":
        return settings | {"find_rate": True}
    return settings | ({"rates_hz": [rate]} if rate else {})


def neighbour(text: str | None) -> tuple[str, float]:
    """Return the case and the rate in Hz in `CASE:30Hz`; raise UsageError for anything else."""
    case_id, _, rate = (text or "").rpartition(":")
    match = re.fullmatch(r"(\d+|\d*\.\d+) ?Hz", rate)
    if not case_id or not match or not 0 < float(match[1]) <= MOST_HZ:
        raise UsageError(f"--beside {text}: expected a case and its rate, such as vim_tiny,custom:30Hz")
    return case_id, float(match[1])

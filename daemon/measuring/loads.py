"""The streams and the server load of a suite, and checks for invalid combinations."""

import re
from collections.abc import Sequence
from typing import Any

from benchd.daemon.config import Suite
from benchd.daemon.errors import UsageError
from benchd.daemon.records import PERCENTILE, QUEUE, WITH_STREAMS, Load, Scenario, Variant

MOST_HZ = 1e6
CUDA_STREAMS = 32  # the size of torch's pool: the 33rd stream is the first one again (c10/cuda/CUDAStream.h)
CAPTURES = 2  # of a model as CUDA graphs, each on its own CUDA stream, because cuBLAS keeps one workspace per stream


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


def _refuse_streams(suite: Suite) -> None:
    if all(streams == 1 for streams in suite.streams):
        return
    if suite.directions == ["training"]:
        raise UsageError("--streams: for inference only; omit --direction training")
    other = next((scenario for scenario in suite.scenarios if scenario not in WITH_STREAMS), None)
    if other:
        raise UsageError(f"--streams: with --scenario {' or '.join(WITH_STREAMS)}, not {other}")


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

"""Plays scripted values instead of reading sensors, for tests and demonstrations: `fake=FILE` with a JSON script.

{"metrics": [{"metric": "power_w", "rail": "VDD_IN", "values": [5.0, 15.0], "period_s": 0.1}], "fail_at": 3}

Each list is played in a loop, one value per period, on the monotonic clock; `rail` is optional. A power or energy
counter with a `scope` is a total from which energy is computed. Reading number `fail_at`, counted from 1, fails.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from benchd.daemon.errors import UsageError
from benchd.daemon.records import Sample
from benchd.daemon.sampling.sources.protocol import PowerSource


class _Metric(Struct, frozen=True, forbid_unknown_fields=True):
    metric: Annotated[str, Meta(min_length=1)]
    values: Annotated[list[float], Meta(min_length=1)]
    period_s: Annotated[float, Meta(ge=1e-6)]
    rail: str = ""
    scope: str = ""


class _Script(Struct, frozen=True, forbid_unknown_fields=True):
    metrics: list[_Metric]
    fail_at: Annotated[int, Meta(ge=1)] | None = None


class Fake:
    """Plays a script. `clock` returns nanoseconds; the script starts when the sampler is created."""

    name = "fake"

    def __init__(self, script: Path | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        if script is None:
            raise UsageError("the fake sampler plays a script: give it as fake=FILE")
        self._script = _read(script)
        self._clock = clock
        self._start_ns = clock()
        self._readings = 0

    def unavailable(self) -> str | None:
        """Return None, because the script has been read."""
        return None

    def power_sources(self) -> list[PowerSource]:
        """Return the metrics that have a scope."""
        return [
            PowerSource(
                source=self.name,
                rail=metric.rail,
                metric="power_w" if metric.metric == "power_w" else "energy_counter_j",
                scope=metric.scope,
                total=True,
                period_s=metric.period_s,
            )
            for metric in self._script.metrics
            if metric.scope and metric.metric in ("power_w", "energy_counter_j")
        ]

    def sample(self) -> Iterator[Sample]:
        """Yield the current value of each metric; raise OSError at reading `fail_at` of the script."""
        self._readings += 1
        if self._readings == self._script.fail_at:
            raise OSError(f"reading {self._readings} fails, as scripted")
        for metric in self._script.metrics:
            t_ns = self._clock()
            step = (t_ns - self._start_ns) // round(metric.period_s * 1e9)
            yield Sample(t_ns, metric.metric, metric.values[step % len(metric.values)], self.name, metric.rail)


def _read(script: Path) -> _Script:
    try:
        return msgspec.json.decode(script.read_bytes(), type=_Script)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise UsageError(f"sampler script {script}: {str(error).replace('`$.', '`')}") from error

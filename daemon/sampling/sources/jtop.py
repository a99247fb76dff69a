"""Power, temperatures, GPU, memory and fan of a Jetson from its jtop service; optional, because sysfs suffices.

Only the bridge imports jtop (jtop_bridge.py says why). It runs with the Python of the jtop service, or the one given as
`jtop=PYTHON`. If it ends or falls silent, it is restarted after RETRY_S.
"""

import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec
from msgspec import Struct

from benchd.daemon.machine.lines import Lines, Rubbish
from benchd.daemon.machine.sysfs import text
from benchd.daemon.records import Sample
from benchd.daemon.sampling.sources.protocol import PowerSource

SYSTEM_PYTHON = Path("/usr/bin/python3")
UNIT = Path("/etc/systemd/system/jtop.service")
BRIDGE = Path(__file__).with_name("jtop_bridge.py")
INTERVAL_S = 0.5  # at 0.1 s, the service uses about 5 % of a core, and its authors advise against less than 0.5 s
START_S = 10.0
SILENCE_S = 2.0
RETRY_S = 5.0
MAX_LINE_BYTES = 2**16
UPTIME_GRAIN_NS = 10_000_000


class _Reading(Struct, frozen=True, tag="reading"):
    """One state of the board at `uptime_s`, updated every `interval_s`.

    `total` is the rail that jtop uses as the board's total, with its power in W, or None; `values` contains (metric,
    rail, value) tuples.
    """

    uptime_s: float
    interval_s: float
    total: tuple[str, float] | None
    values: list[tuple[str, str, float]]

    @property
    def total_rail(self) -> str | None:
        return self.total[0] if self.total else None

    @property
    def rails(self) -> list[str]:
        """Return the rails other than the total."""
        return [rail for metric, rail, _ in self.values if metric == "power_w"]


class _End(Struct, frozen=True, tag="end"):
    reason: str


class Jtop:
    """Yields each reading of the service once, at most twice per second, stamped by the service to within about 10 ms.

    `power_w` by rail, `zone_temp_c` by zone, `gpu_utilization_percent`, `gpu_clock_hz`, `memory_used_bytes`,
    `nvmap_used_bytes`, `fan_speed_percent` and `fan_speed_rpm` by fan, and `nvpmodel_id` with the mode's name as its
    rail, each if the service offers it. A different client may already have set a slower or faster rate.
    """

    name = "jtop"

    def __init__(self, python: Path | None = None) -> None:
        self._python = python or python_of(UNIT)
        self._bridge: _Bridge | None = None
        self._failure: str | None = None
        self._due_s = 0.0
        self._first: _Reading | None = None
        self._interval_s = INTERVAL_S

    def unavailable(self) -> str | None:
        """Return why there is no reading yet, None once there is one; the first call waits for it, up to START_S."""
        tried = self._bridge or self._failure
        deadline = time.monotonic() + (0.0 if tried else START_S)
        self._receive()
        while self._first is None and self._bridge and (wait_s := deadline - time.monotonic()) > 0:
            select.select([self._bridge], [], [], wait_s)
            self._receive()
        if self._first:
            return None
        return self._failure or f"no reading has come from {self._python} yet"

    def power_sources(self) -> list[PowerSource]:
        """Return jtop's total, if there is one, then the rails, each with its name as its scope."""
        if self._first is None:
            return []
        total = self._first.total_rail
        sources = [self._power_source(total, total=True)] if total else []
        return sources + [self._power_source(rail, total=False) for rail in self._first.rails]

    def sample(self) -> Iterator[Sample]:
        """Yield the readings received since the last call.

        Raises ChildProcessError while the bridge is down, and ValueError if the power rails differ from the first
        reading's, because jtop's total is then a sum over different rails.
        """
        changed = None
        for reading in self._receive():
            yield from self._samples(reading)
            changed = self._changed_rails(reading) or changed
        if self._failure:
            raise ChildProcessError(f"{self._failure}; no readings since")
        if changed:
            raise ValueError(changed)

    def close(self) -> None:
        """End the bridge."""
        if self._bridge:
            self._bridge.stop()
            self._bridge = None

    def __del__(self) -> None:
        self.close()

    def _receive(self) -> list[_Reading]:
        """Return the received readings, after starting a bridge that is due or dropping one that has ended."""
        if self._bridge is None and time.monotonic() >= self._due_s:
            self._start()
        if self._bridge is None:
            return []
        readings = self._bridge.read()
        if readings:
            self._first = self._first or readings[0]
            self._interval_s = readings[-1].interval_s
            self._failure = None
        if self._bridge.ended:
            self._lose(self._bridge.ended)
        return readings

    def _start(self) -> None:
        try:
            self._bridge = _Bridge(self._python)
        except OSError as error:
            self._lose(f"{self._python} did not start: {error.strerror}; give the Python that has jtop as jtop=PYTHON")

    def _lose(self, reason: str) -> None:
        """Record the failure, and when to start another bridge."""
        self.close()
        self._failure, self._due_s = reason, time.monotonic() + RETRY_S

    def _samples(self, reading: _Reading) -> Iterator[Sample]:
        t_ns = _monotonic_ns(reading.uptime_s)
        if reading.total and self._first and reading.total_rail == self._first.total_rail:
            yield Sample(t_ns, "power_w", reading.total[1], self.name, reading.total[0])
        for metric, rail, value in reading.values:
            yield Sample(t_ns, metric, value, self.name, rail)

    def _changed_rails(self, reading: _Reading) -> str | None:
        if self._first is None or _power_rails(reading) == _power_rails(self._first):
            return None
        return f"the power rails are now {_power_rails(reading)}; they were {_power_rails(self._first)}"

    def _power_source(self, rail: str, *, total: bool) -> PowerSource:
        scope = f"module input {rail}" if rail == "VDD_IN" else f"rail {rail}"
        return PowerSource(
            source=self.name, rail=rail, metric="power_w", scope=scope, total=total, period_s=self._interval_s
        )


def python_of(unit: Path) -> Path:
    """Return the Python of the program that jtop's unit starts, or the system's if unknown.

    If pip must not write to the system's Python, as on JetPack 7, jtop has a separate environment.
    """
    program = re.search(r"^ExecStart=(\S+)", text(unit) or "", re.MULTILINE)
    script = text(Path(program[1])) if program else None
    named = re.match(r"#!(/\S*python\S*)", script or "")
    return Path(named[1]) if named else SYSTEM_PYTHON


def _power_rails(reading: _Reading) -> str:
    return f"{reading.total_rail or 'no rail'} as total, and {', '.join(reading.rails) or 'no others'}"


def _monotonic_ns(uptime_s: float) -> int:
    """Return the time on CLOCK_MONOTONIC; uptime includes suspends and is truncated to its resolution."""
    suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return round(uptime_s * 1e9) - suspended_ns + UPTIME_GRAIN_NS // 2


class _Bridge:
    """A bridge process and its pipes; raises OSError if its Python cannot be started."""

    def __init__(self, python: Path) -> None:
        self.ended: str | None = None
        self._patience_s = START_S
        self._heard_s = time.monotonic()
        # -I, because `import jtop` must find the system's package, not our file of this name or one in our PYTHONPATH.
        self._process = subprocess.Popen(
            [python, "-I", BRIDGE, str(INTERVAL_S)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._stdout = cast("IO[bytes]", self._process.stdout)
        self._lines: Lines[_Reading | _End] = Lines(
            self.fileno(), msgspec.json.Decoder(_Reading | _End), MAX_LINE_BYTES
        )

    def fileno(self) -> int:
        return self._stdout.fileno()

    def read(self) -> list[_Reading]:
        """Return the received readings; once no more can follow, `ended` gives the reason."""
        messages, now_s = self._lines.read(), time.monotonic()
        readings = [message for message in messages if isinstance(message, _Reading)]
        for message in messages:
            if isinstance(message, Rubbish):
                self._end(f"wrote an invalid message: {message}")
            elif isinstance(message, _End):
                self.ended = self.ended or message.reason
        if self._lines.ended:
            self._end("ended without a reason; see standard error")
        if readings:
            self._heard_s = now_s
            self._patience_s = max(3.0 * readings[-1].interval_s, SILENCE_S)
        elif now_s - self._heard_s > self._patience_s:
            self._end(f"sent no reading for {self._patience_s:g} s")
        return readings

    def _end(self, how: str) -> None:
        self.ended = self.ended or f"the bridge to jtop {how}"

    def stop(self) -> None:
        """Kill the process, which has no state to clean up."""
        self._stdin.close()
        self._stdout.close()
        self._process.kill()
        self._process.wait()

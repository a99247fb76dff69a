"""The sampler process: `python -m benchd.daemon.sampling.sources --sources procfs,fake=FILE --period 0.1`.

Reads all sources at each tick of an absolute grid on CLOCK_MONOTONIC and writes JSON lines (protocol.py). Commands
arrive on standard input, and this process ends when that closes, so that it never outlives its parent.
"""

import argparse
import math
import os
import select
import sys
import time
from contextlib import suppress

import msgspec

from benchd.daemon.errors import UsageError
from benchd.daemon.records import Sample
from benchd.daemon.sampling.sources import PowerMeter, Sampler, Watcher, load
from benchd.daemon.sampling.sources.protocol import Batch, FollowRequest, Message, PowerSource, Refusal

BATCH_NS = 10**9
COMMANDS = 0
MAX_COMMAND_BYTES = 2**16


def main() -> int:
    """Sample until standard input ends; return 2 after sending a Refusal."""
    out = _claim_stdout()
    try:
        arguments = _arguments()
        sources = [_Source(load(name)) for name in arguments.sources.split(",")]
        _pin(arguments.cpu)
    except UsageError as error:
        _write(out, Refusal(str(error)))
        return 2
    with suppress(BrokenPipeError):  # the parent is gone
        _Loop(sources, round(arguments.period * 1e9), out).run()
    return 0


def _claim_stdout() -> int:
    """Return a descriptor for messages only, after redirecting libraries' output to standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    return out


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchd.daemon.sampling.sources", description="Read sensors on a fixed grid.")
    parser.add_argument("--sources", required=True, metavar="NAME[=PATH],...", help="the samplers, in order")
    parser.add_argument("--period", required=True, type=float, metavar="SECONDS", help="from one tick to the next")
    parser.add_argument("--cpu", type=int, metavar="N", help="run on this CPU only")
    return parser.parse_args()


def _pin(cpu: int | None) -> None:
    try:
        if cpu is not None:
            os.sched_setaffinity(0, [cpu])
    except OSError as error:
        raise UsageError(f"--cpu {cpu}: {error.strerror}; choose a CPU that this process may run on") from error


def _write(out: int, message: Message) -> None:
    line = memoryview(msgspec.json.encode(message) + b"\n")
    while line:
        line = line[os.write(out, line) :]


class _Source:
    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.failure: str | None = None
        self._available = False
        self._min_interval_ns: int = getattr(sampler, "min_interval_ns", 0)
        self._due_ns = 0

    def power(self) -> list[PowerSource]:
        """Return the sampler's power sources while it is available."""
        return self.sampler.power_sources() if self._available and isinstance(self.sampler, PowerMeter) else []

    def look(self) -> None:
        """Try an unavailable sampler again."""
        if self._available:
            return
        try:
            self.failure = self.sampler.unavailable()
        except Exception as error:  # a failing sensor must not stop the others
            self.failure = _reason(error)
        self._available = self.failure is None

    def forget(self) -> None:
        """Drop a reported failure, unless it persists."""
        if self._available:
            self.failure = None

    def read(self, into: list[Sample]) -> None:
        """Append the current samples unless it is too soon; samples read before a failure are kept."""
        now_ns = time.monotonic_ns()
        if not self._available or now_ns < self._due_ns:
            return
        self._due_ns = now_ns + self._min_interval_ns
        try:
            for sample in self.sampler.sample():
                if not math.isfinite(sample.value):
                    raise ValueError(f"{sample.metric} {sample.rail} read as {sample.value}")
                into.append(sample)
        except Exception as error:  # a failing sensor must not stop the others
            self.failure = _reason(error)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Loop:
    def __init__(self, sources: list[_Source], period_ns: int, out: int) -> None:
        self._sources = sources
        self._period_ns = period_ns
        self._out = out
        self._commands = b""
        self._flushes = 0
        self._samples: list[Sample] = []
        self._ticks_ns: list[int] = []
        self._batch_due_ns = 0

    def run(self) -> None:
        for source in self._sources:
            source.look()
        due_ns = time.monotonic_ns()
        while self._listen(due_ns):
            self._tick()
            due_ns = self._next(due_ns)
            if time.monotonic_ns() >= self._batch_due_ns:
                self._send()
                for source in self._sources:
                    source.look()

    def _listen(self, until_ns: int) -> bool:
        """Execute commands until `until_ns`; return False at the end of standard input."""
        while True:
            wait_s = max(0.0, (until_ns - time.monotonic_ns()) / 1e9)
            if not select.select([COMMANDS], [], [], wait_s)[0]:
                return True
            data = os.read(COMMANDS, MAX_COMMAND_BYTES)
            if not data:
                return False
            *lines, self._commands = (self._commands + data).split(b"\n")
            for line in lines:
                self._obey(line)

    def _obey(self, line: bytes) -> None:
        command = msgspec.json.decode(line, type=FollowRequest)
        if command.watch_pids:
            for source in self._sources:
                if isinstance(source.sampler, Watcher):
                    source.sampler.watch(*command.watch_pids)
        if command.flush:
            self._flushes += 1
            self._send()

    def _tick(self) -> None:
        self._ticks_ns.append(time.monotonic_ns())
        for source in self._sources:
            source.read(self._samples)

    def _next(self, due_ns: int) -> int:
        """Return the first tick of the grid in the future."""
        late = max(0, (time.monotonic_ns() - due_ns) // self._period_ns)
        return due_ns + (late + 1) * self._period_ns

    def _send(self) -> None:
        now_ns = time.monotonic_ns()
        batch = Batch(
            samples=self._samples,
            t_ns=now_ns,
            cpu_s=time.process_time(),
            ticks_ns=self._ticks_ns,
            flushes=self._flushes,
            failures={source.sampler.name: source.failure for source in self._sources if source.failure},
            power=[power for source in self._sources for power in source.power()],
        )
        _write(self._out, batch)
        self._samples, self._ticks_ns = [], []
        self._batch_due_ns = now_ns + BATCH_NS
        for source in self._sources:
            source.forget()


if __name__ == "__main__":
    sys.exit(main())

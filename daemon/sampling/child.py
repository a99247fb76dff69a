"""The supervisor's side of the sampler process: starts it, collects its samples and detects its death."""

import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, cast

import msgspec

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine import interpreter
from benchd.daemon.machine.lines import Lines, Rubbish
from benchd.daemon.records import SamplerReport, Summary, Window
from benchd.daemon.sampling import sources as known
from benchd.daemon.sampling.series import Samples
from benchd.daemon.sampling.sources.protocol import FollowRequest, Message, Refusal

START_S = 15.0  # together with the preceding and following steps, less than the unit's watchdog timeout
FLUSH_S = 2.0
STOP_S = 1.0
# samples kept from before a case, because the energy window of a cold start begins before its process is spawned
KEPT_S = 10.0
PIPE_BYTES = 2**18  # enough for minutes of batches while the owner is busy
ITSELF = "sampler"


class NotStarted(NotAvailable):
    """The sampler process did not deliver a first reading; the message gives the reason."""


class SamplerProcess:
    """A sampler process for the duration of a `with` block.

    The owner waits on `fileno()` and calls `receive()` when it is readable. If the process dies, the rest of the case
    has no samples, and the next case restarts it. Entering raises UsageError for invalid sources and NotStarted if the
    process does not start.
    """

    def __init__(self, sources: Sequence[str], period_s: float, cpu: int | None = None) -> None:
        self.samples = Samples(known.check(sources), period_s)
        self._arguments = ["--sources", ",".join(sources), "--period", str(period_s)]
        self._arguments += [] if cpu is None else ["--cpu", str(cpu)]
        self._child: _Child | None = None
        self._lost, self._lost_ns = "", 0  # how the process ended, and when the last reading before that began
        self._refusal: str | None = None

    def __enter__(self) -> "SamplerProcess":
        # This pipe is never readable; the owner waits on it while there is no process.
        self._silence = os.pipe()
        try:
            self._child = _Child(self._arguments)
            self._wait(lambda: self.samples.last_tick_ns() is not None or self._child is None, START_S)
            self._require_started()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _require_started(self) -> None:
        if self._refusal:
            raise UsageError(self._refusal)
        if self._lost:
            raise NotStarted(f"{self._lost} before its first reading; see standard error")
        if self.samples.last_tick_ns() is None:
            raise NotStarted(f"the sampler process sent no sample within {START_S:g} s")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._child:
            self._child.stop()
            self._child = None
        for fd in self._silence:
            os.close(fd)

    @property
    def pid(self) -> int | None:
        """Return the process id, None while there is no process."""
        return self._child.pid if self._child else None

    def fileno(self) -> int:
        """Return the descriptor to wait on; it may change with each `receive`."""
        return self._child.fileno() if self._child else self._silence[0]

    def watch(self, *pids: int) -> None:
        """Begin a case: follow the processes `pids` and drop samples that are too old for the case."""
        self.samples.drop_before(time.monotonic_ns() - round(KEPT_S * 1e9))
        if self._child is None:
            self._start_again()
        self._tell(FollowRequest(watch_pids=list(pids)))

    def receive(self) -> None:
        """Read the batches that have arrived, without waiting."""
        child = self._child
        if child is None:
            return
        for message in child.lines.read():
            self._take(child, message)
        if child.lines.ended:
            self._lose(f"ended with status {child.stop()}")

    def flush(self, wait_s: float = FLUSH_S) -> bool:
        """Request pending samples and wait for them; return whether all samples so far have arrived."""
        child = self._child
        if child is None or not self._tell(FollowRequest(flush=True)):
            return False
        child.asked += 1
        self._wait(lambda: child.answered >= child.asked or self._child is not child, wait_s)
        answered = child.answered >= child.asked
        if not answered and self._child is child:
            now_ns = time.monotonic_ns()
            span = Window(self.samples.last_tick_ns() or now_ns, now_ns)
            self.samples.fail(span, {ITSELF: f"no answer within {wait_s:g} s"})
        return answered

    def cut(self, window: Window) -> tuple[dict[str, Summary], SamplerReport]:
        """Return summaries of the samples in the window, by `metric` or `metric@rail`, and a report on the sampling."""
        summaries, report = self.samples.cut(window)
        if self._lost and self._lost_ns <= window.end_ns:
            failures = report.failures | {ITSELF: f"{self._lost}; no samples since then"}
            report = msgspec.structs.replace(report, failures=failures)
        return summaries, report

    def _wait(self, done: Callable[[], bool], wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while not done() and (remaining_s := deadline - time.monotonic()) > 0:
            if select.select([self], [], [], remaining_s)[0]:
                self.receive()

    def _tell(self, command: FollowRequest) -> bool:
        """Send a command; return False if the process has died, after handling its death."""
        child = self._child
        if child and child.tell(command):
            return True
        self.receive()
        return False

    def _take(self, child: "_Child", message: Message | Rubbish) -> None:
        if isinstance(message, Rubbish):
            now_ns = time.monotonic_ns()
            self.samples.fail(Window(now_ns, now_ns), {ITSELF: f"invalid message: {message}"})
            return
        if isinstance(message, Refusal):
            self._refusal = message.reason
            return
        self.samples.add(message)
        child.answered = message.flushes

    def _lose(self, how: str) -> None:
        """Record the end of the process."""
        self._child = None
        self._lost, self._lost_ns = f"the sampler process {how}", self.samples.last_tick_ns() or time.monotonic_ns()

    def _start_again(self) -> None:
        try:
            self._child = _Child(self._arguments)
        except OSError as error:  # the case continues without samples
            self._lose(f"did not start: {error.strerror}")
        else:
            self._lost = ""
            self.samples.begin_process()


class _Child:
    """One sampler process and its pipes; `asked` and `answered` are the numbers of requested and completed flushes."""

    def __init__(self, arguments: list[str]) -> None:
        self.asked = 0
        self.answered = 0
        # A new interpreter in its own session, so that Ctrl-C in the terminal does not reach it.
        self._process = subprocess.Popen(
            interpreter.of_module("benchd.daemon.sampling.sources", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pipesize=PIPE_BYTES,
            start_new_session=True,
        )
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._stdout = cast("IO[bytes]", self._process.stdout)
        self.lines: Lines[Message] = Lines(self.fileno(), msgspec.json.Decoder(Message))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._stdout.fileno()

    def tell(self, command: FollowRequest) -> bool:
        try:
            self._stdin.write(msgspec.json.encode(command) + b"\n")
        except BrokenPipeError:
            return False
        return True

    def stop(self) -> int | None:
        """Let the process exit, else terminate or kill it; return its exit status, or None if it survives even that."""
        self._stdin.close()
        self._stdout.close()
        for end in (self._process.poll, self._process.terminate, self._process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(STOP_S)
        return None

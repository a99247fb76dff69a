"""Resources that outlive a case: the machine's lock, the signals, the sampler process, the environment and the sinks.

`bench-once`, the service, `compare --live` and `profile` each measure in a session. Signals only set a flag; the loop
that waits for a child acts on it.
"""

import os
import select
import signal
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import msgspec

from benchd.daemon import journal
from benchd.daemon.config import Config
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.machine import folders, identity
from benchd.daemon.machine.lock import MachineLock
from benchd.daemon.machine.quiet import Start, settle
from benchd.daemon.machine.signals import on_signals
from benchd.daemon.measuring import recording
from benchd.daemon.measuring.plan import Machine, PlannedCase
from benchd.daemon.measuring.process import Child, Worker
from benchd.daemon.measuring.protocol import Job, StageName, unmeasured
from benchd.daemon.measuring.recording import RunHeader, RunId
from benchd.daemon.records import Environment, Record, Sample, Status, encode
from benchd.daemon.sampling import sources
from benchd.daemon.sampling.child import SamplerProcess

ATTEND_S = 1.0
INTERRUPTED = "interrupted by a signal"
Ending = tuple[Status | None, str | None]
_version = cache(version)  # cached, because reading the file takes 3 ms for each process of a race
FEWEST_CPUS = 4  # with fewer, reserving a CPU would cost the case more than the sampler does


class Sink:
    """A destination for records; methods that a sink does not override have no effect.

    Only `stage` is called while a case is being timed.
    """

    def begin(self, plan: Sequence[PlannedCase]) -> None:
        """Receive the plan."""

    def stage(self, planned: PlannedCase, process: int, stage: StageName, done: str = "") -> None:
        """Receive the running case, its stage and, if known, the progress."""

    def publish(self, record: Record, body: bytes) -> None:
        """Receive one finished record and its encoded form."""

    def end(self) -> None:
        """Deliver what remains."""

    def close(self) -> None:
        """Close the sink's files, even if the run ended before it began."""


@dataclass
class Session:
    """The resources shared by the cases of one or more runs; leaving the `with` block ends the sampler and the sinks.

    Paths come only from the command line or the configuration. `flags` say what else benchd is running on the machine.
    `attend` is called about once per second while a child works; if it returns a reason, the child is ended. `start`
    defines what to wait for before measuring. `interrupted` is set if a signal has ended the session, and `failures`
    lists the files and records that could not be stored.
    """

    config: Config
    machine: Machine
    output: Path
    sinks: Sequence[Sink] = ()
    attend: Callable[[], str | None] | None = None
    start: Start = field(default_factory=Start)
    given_artifacts: Path | None = None
    workspace_bytes: int | None = None
    flags: tuple[str, ...] = ()
    interrupted: bool = False
    failures: list[str] = field(default_factory=list)
    _started: ExitStack = field(default_factory=ExitStack)
    _sampler: SamplerProcess | None = None
    _sampler_cpu: int | None = None
    _environment: Environment | None = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as closing:
            for sink in self.sinks:
                closing.callback(sink.close)
            self.rest()

    def rest(self) -> None:
        """Stop the sampler until the next case, because the machine may change in between."""
        self._sampler = self._environment = None
        self._started.close()

    @contextmanager
    def measuring(self, ending: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
        """Hold the machine's lock and handle the signals that end a run; raise Busy if another process is measuring."""
        with MachineLock(waiting=self.start.waiting), on_signals(ending, self._interrupt) as (self._wake, _):
            settle(self.start, self._wake, lambda: self.interrupted)
            if not self.start.quiet_s:
                self.start = replace(self.start, out=None)  # the user is informed, or asked, only once per session
            yield

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True

    def run(self, suite_id: str) -> RunHeader:
        """Return the header shared by a run's records; the environment is described once until `rest`."""
        self._environment = self._environment or self.machine.environment()
        return RunHeader(
            device_id=identity.device_id(self.config.device.id),
            boot_id=identity.boot_id(),
            suite_id=suite_id,
            tool_version=_version("benchd"),
            environment=self._environment,
            flags=self.flags,
        )

    def job(self, planned: PlannedCase, suite_id: str) -> Job:
        """Return the job with which a child builds the case's model."""
        return Job(
            case=planned.case,
            limits=planned.limits,
            device=self.machine.device,
            cache=str(folders.cache()),
            own=planned.own,
            inputs=msgspec.structs.replace(planned.inputs, accuracy=None),
            suite_id=suite_id,
            output=str(self.output),
            artifacts=str(folders.artifacts()),
            given_artifacts=str(self.given_artifacts) if self.given_artifacts else None,
            workspace_bytes=self.workspace_bytes,
            gpu_uuid=self.machine.gpu_uuid,
        )

    def sampler(self, plan: Sequence[PlannedCase]) -> SamplerProcess:
        """Return the sampler, which is started if necessary, on a CPU that the plan's cases leave free."""
        cpus, device = os.sched_getaffinity(0), self.machine.device
        threads = max(((entry.case.threads or len(cpus)) * entry.case.streams for entry in plan), default=len(cpus))
        cpu = spare_cpu(cpus, device, threads)
        if self._sampler and cpu != self._sampler_cpu:
            self._started.close()
            self._sampler = None
        if self._sampler is None:
            wanted = self.config.sampling
            read = wanted.sources or sources.present(device, self.machine.gpu_uuid)
            self._sampler = self._started.enter_context(SamplerProcess(read, wanted.period_s, cpu))
            self._sampler_cpu = cpu
        return self._sampler

    def latest_samples(self) -> list[Sample]:
        """Return the last sample of every sensor."""
        return self._sampler.samples.latest() if self._sampler else []

    def wait(self, child: Child[Any], remaining_s: float) -> bool:
        """Wait for the child, a signal or the next call of `attend`; return whether the child has sent anything."""
        waiting: list[Child[Any] | SamplerProcess | socket.socket] = [child, self._wake]
        waiting += [self._sampler] if self._sampler else []
        ready, _, _ = select.select(waiting, [], [], min(remaining_s, ATTEND_S) if self.attend else remaining_s)
        if self._sampler in ready:
            self._sampler.receive()
        if self._wake in ready:
            self._wake.recv(4096)
        return child in ready

    def follow(self, worker: Worker, remaining_s: float, too_long: str) -> Ending | None:
        """Wait once for a worker; return how and why we ended it, (None, None) if it ended itself, else None."""
        if remaining_s <= 0:
            worker.stop()
            return "timeout", too_long
        is_ready = self.wait(worker, remaining_s)
        worker.cut_log()
        reason = self.reason_to_end()
        if reason:
            worker.stop()
            return "aborted", reason
        return (None, None) if is_ready and worker.receive() else None

    def reason_to_end(self) -> str | None:
        """Return why the child must be ended, else None."""
        reason = self.attend() if self.attend and not self.interrupted else None
        self.interrupted = self.interrupted or reason == INTERRUPTED
        return INTERRUPTED if self.interrupted else reason

    def publish(self, record: Record) -> None:
        """Pass the record to each sink, or a failed record in its place if it contains a number that is not finite."""
        try:
            body = encode(record)
        except ValueError as error:
            self.failures.append(f"{record.case_id}: {error}")
            record = self._failed(record, str(error))
            body = encode(record)
        for sink in self.sinks:
            self._hand_over(sink, record, body)

    def _failed(self, record: Record, reason: str) -> Record:
        """Return a failed record to publish instead; without one, a service would measure the case over and over."""
        run, run_id = self.run(record.suite_id), RunId(record.run_id, record.t_wall, record.t_mono_ns)
        failed = recording.record(record.case, record.preset, run, run_id, [unmeasured("failed", reason)])
        return msgspec.structs.replace(
            failed, limits=record.limits, own=record.own, inputs=record.inputs, flags=record.flags
        )

    def _hand_over(self, sink: Sink, record: Record, body: bytes) -> None:
        try:
            sink.publish(record, body)
        except BenchdError as error:  # for example a full disk: the other sinks and the next case continue
            self.failures.append(f"{record.case_id}: {error}")

    def keep(self, path: Path, content: bytes) -> bool:
        """Write a result file and return whether that succeeded; a failure is added to `failures`."""
        try:
            journal.replace(path, [content])
        except BenchdError as error:
            self.failures.append(str(error))
            return False
        return True

    def end(self) -> None:
        """Make the sinks deliver what remains."""
        for sink in self.sinks:
            sink.end()

    def unstored(self, err: TextIO) -> int:
        """Print a warning for each record and file that could not be stored; return 1 if there are any, else 0."""
        err.writelines(f"warning: not stored: {failure}\n" for failure in dict.fromkeys(self.failures))
        return int(bool(self.failures))


def writable(folder: Path, name: str, *, create: bool = True) -> Path:
    """Create the folder, check that it is writable before anything is measured, and return it.

    Without `create`, only the existing part of the path is checked. Raises UsageError if the check fails.
    """
    tested = folder if create else next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        str(folder.resolve()).encode()  # raises an error for a path that cannot be sent to a worker in JSON
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=tested):
            return folder.resolve()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name}: the path is not UTF-8; choose a different folder") from error
    except OSError as error:
        raise UsageError(f"{name}: {folder} cannot be written: {error.strerror}") from error


@contextmanager
def temporary_output() -> Iterator[Path]:
    """Create a folder that is deleted at the end; raise UsageError if it cannot be created anywhere."""
    with journal.explaining(Path("TMPDIR")):
        folder = tempfile.TemporaryDirectory()
    with folder as path:
        yield Path(path)


def made_output(folder: Path, *, create: bool = True) -> Path:
    """Create and check the `--output` folder and benchd's own with `writable`; raise UsageError if that fails."""
    writable(folders.cache(), "the cache folder (to move it, set XDG_CACHE_HOME)", create=create)
    writable(folders.artifacts(), "the folder for exported files (to move it, set XDG_STATE_HOME)", create=create)
    return writable(folder, f"--output {folder}", create=create)


def spare_cpu(cpus: Collection[int], device: str, threads: int) -> int | None:
    """Return a CPU for the sampler that the cases do not use, None if there are too few."""
    used = 1 if device == "cuda" else threads
    return max(cpus) if len(cpus) >= FEWEST_CPUS and used < len(cpus) else None

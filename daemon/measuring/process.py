"""Child processes with torch: spawns them, reads their JSON lines, enforces deadlines, and reports how they ended."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec

from benchd.daemon.machine import interpreter, strays
from benchd.daemon.machine.lines import Lines, Rubbish
from benchd.daemon.measuring.protocol import Job, Message, Outcome, Stage, StageName, encoded, unmeasured
from benchd.daemon.records import Status

# The heap is kept, because fresh memory for every result would cost more in page faults than the arithmetic.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30)}
TERMINATE_GRACE_S = 1.0
# out of 1000: if memory runs out, the kernel kills the worker first, although its size may exclude GPU memory
FIRST_TO_KILL = "500"
EXIT_GRACE_S = 10.0
SUSPEND_S = 5.0
SUSPEND_LOOK_S = 0.0001
SUSPEND_LOOKS = 1000  # number of looks after which the signal is sent again
STDERR = 2
LOG_BYTES = 2**24
CUT = b"This log exceeded 16 MiB. Everything before this line was deleted.\n"
KILLED = "the worker was killed by SIGKILL, probably because memory ran out,"
# the broker's password and systemd's socket are for the service only, because a worker runs models' code
WITHHELD = {"BENCHD_MQTT_PASSWORD", "CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"}

T = TypeVar("T")
C = TypeVar("C", bound="Child[Any]")


class Child(Generic[T]):
    """A fresh interpreter that runs `module`: it gets a job on stdin and sends messages of type `T` on a separate pipe.

    Its output goes to `log`, or to our stderr. It has its own session, so that a terminal's Ctrl-C does not reach it;
    leaving the `with` block ends it and everything that it started. `rubbish` is the last line that was not a message.
    """

    def __init__(
        self,
        module: str,
        job: Job,
        decoder: msgspec.json.Decoder[T],
        log: Path | None = None,
        python: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.rubbish: Rubbish | None = None
        self._log = log
        self._variables = variables or {}
        self._is_closed = False
        self._mark = uuid.uuid4().hex
        with ExitStack() as stack:
            read_end, write_end = os.pipe()
            stack.callback(os.close, read_end)
            self._lines = Lines(read_end, decoder)
            try:
                command = interpreter.of_module(module, str(write_end), python=python)
                self._process = self._spawn(command, job, write_end)
            finally:
                os.close(write_end)
            self._held = stack.pop_all()

    def _spawn(self, command: list[str], job: Job, write_end: int) -> subprocess.Popen[bytes]:
        line = encoded(job) + b"\n"
        if self._log:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.unlink(missing_ok=True)
        with self._log.open("ab") if self._log else nullcontext(STDERR) as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[write_end],
                start_new_session=True,
                env={**environment(job.device, job.cache, job.gpu_uuid), **self._variables, strays.MARK: self._mark},
            )
        with suppress(OSError):  # it died immediately, see below
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(FIRST_TO_KILL)
        if process.stdin:
            with suppress(BrokenPipeError):  # it died immediately; its exit status gives the reason
                process.stdin.write(line)
                process.stdin.flush() if job.waits else process.stdin.close()
        return process

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the read end of the pipe, for a select loop."""
        return self._lines.fileno()

    @property
    def has_ended(self) -> bool:
        """Return whether no more messages can arrive."""
        return self._lines.ended

    def messages(self) -> list[T]:
        """Return the messages that have arrived."""
        read = self._lines.read()
        self.rubbish = next((message for message in reversed(read) if isinstance(message, Rubbish)), self.rubbish)
        return [message for message in read if not isinstance(message, Rubbish)]

    def stop(self) -> None:
        """End the process and everything that it started: terminate, then kill."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TERMINATE_GRACE_S)
        self._signal(signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Signal the process to finish by itself and send its results so far."""
        self._process.terminate()

    def reap(self) -> int:
        """Wait briefly for a process that has closed its pipe, then kill it; return its exit status."""
        try:
            return self._process.wait(EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            return self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # already gone
            os.killpg(self._process.pid, number)

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process and everything that it started; later calls have no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process.poll() is None:
            self.stop()
        self._signal(signal.SIGKILL)  # kills anything left running in its session
        self._process.wait()
        strays.end(self._mark)
        if self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._held.close()


class Worker(Child[Message]):
    """A worker process: one process of a case. Its output goes to the log file."""

    def __init__(self, job: Job, log: Path, python: str = "", variables: Mapping[str, str] | None = None) -> None:
        self._limits = job.limits
        self._runs_own = job.module is not None
        self._outcome: Outcome | None = None
        self.stage: StageName = "import"
        self.is_waiting = False
        self.announced: tuple[StageName | None, str] = None, ""
        self.done = ""
        self._log_path = log
        self._stage_since = time.monotonic()
        super().__init__("benchd.daemon.worker", job, msgspec.json.Decoder(Message), log, python, variables)

    def receive(self) -> bool:
        """Read the messages that have arrived; return True after the outcome or at the end of the pipe."""
        for message in self.messages():
            if isinstance(message, Stage):
                # a check has a single deadline, other stages have one per part
                if not self.stage == message.name == "check":
                    self._stage_since = time.monotonic()
                self.stage, self.done = message.name, message.done
                self.is_waiting = message.name == "ready"
            else:
                self._outcome = message
        return self.has_ended or (self._outcome is not None and not self._outcome.is_partial)

    def cut_log(self) -> None:
        """Empty a log that is too long: otherwise a model that prints in every call would fill the disk."""
        with suppress(OSError):
            if self._log_path.stat().st_size > LOG_BYTES:
                self._log_path.write_bytes(CUT)

    def remaining_s(self) -> float:
        """Return how much longer the current stage may last."""
        return self._stage_since + self._limits.deadline_s(self.stage) - time.monotonic()

    def go_on(self) -> None:
        """Let a waiting job continue; its next stage begins now."""
        if self._process.stdin:
            with suppress(BrokenPipeError):  # it has died; its exit status gives the reason
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()
        self._signal(signal.SIGCONT)
        self.is_waiting, self._stage_since = False, time.monotonic()

    def suspend(self) -> bool:
        """Stop the process and all others in its session until `go_on`, because a pool's threads keep spinning.

        Returns whether it stopped. One thread receives the signal and stops the others, which takes milliseconds on a
        busy machine. The signal is repeated, because a thread that waits for a stopped child never reacts.
        """
        until_s = time.monotonic() + SUSPEND_S
        while time.monotonic() < until_s:
            self._signal(signal.SIGSTOP)
            for _ in range(SUSPEND_LOOKS):
                if os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG):
                    return True
                time.sleep(SUSPEND_LOOK_S)
            self._signal(signal.SIGCONT)
        return False

    def stop(self) -> None:
        """End the process and everything that it started, even if it is suspended."""
        self.is_waiting = False
        self._signal(signal.SIGCONT)
        super().stop()

    def outcome(self, ended_by: Status | None, reason: str | None) -> Outcome:
        """Reap the process and return its Outcome, or one that says how it ended; `ended_by` is set if we ended it."""
        code, outcome = self.reap(), self._outcome
        if outcome and not outcome.is_partial and not ended_by:
            return outcome
        if reason is None:
            ended_itself = self._runs_own and code >= 0 and not self.rubbish
            hint = "; remove os._exit from the module" if ended_itself else ""
            reason = (
                f"{self._exit_reason(code)} in stage {self.stage}{self._last_words()}{hint} "
                f"(log: logs/{self._log_path.name})"
            )
        if outcome and ended_by != "aborted":
            return msgspec.structs.replace(outcome, missing={"probes": reason, **outcome.missing})
        return unmeasured(ended_by or "failed", reason)

    def _exit_reason(self, code: int) -> str:
        if self.rubbish:
            return f"the worker wrote garbage to its pipe ({self.rubbish})"
        if code == -signal.SIGKILL:
            return KILLED
        if code < 0:
            return f"the worker was killed by {signal.Signals(-code).name}"
        return f"the worker exited with status {code} and without a result"

    def _last_words(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""


def allocator(device: str) -> dict[str, str]:
    """Return the heap settings of a child that measures on `device`, cpu or cuda."""
    # a Tegra's GPU shares the memory: a kept heap would retain memory that an engine build has freed
    return ALLOCATOR if device == "cpu" else {}


def environment(device: str, cache: str, gpu_uuid: str | None) -> dict[str, str]:
    """Return our environment with the settings for a child with torch that measures on `device`, cpu or cuda.

    The variables in `WITHHELD` are left out.
    """
    # restricts the child to the GPU whose sensors are read, by the only name that is valid everywhere
    gpu = {"CUDA_VISIBLE_DEVICES": gpu_uuid} if gpu_uuid else {}
    ours = {name: value for name, value in os.environ.items() if name not in WITHHELD}
    # without a PATH, a compiler cannot find its own parts
    return {"PATH": os.defpath} | ours | settings(device, cache) | gpu


def settings(device: str, cache: str) -> dict[str, str]:
    """Return the environment variables for such a child, which are the same for every case."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    # fp32 must mean fp32 in every runtime, and TensorRT inside ONNX Runtime has no other switch
    exact = {"NVIDIA_TF32_OVERRIDE": "0"}
    # on a CPU, the profiler's library would complain that there is no GPU
    quiet = {"KINETO_LOG_LEVEL": "6"} if device == "cpu" else {}
    return allocator(device) | caches | exact | quiet | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}

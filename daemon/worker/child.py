"""Common parts of child processes with torch: report stages, explain failures. Torch-free."""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from benchd.daemon.errors import BenchdError, Unsupported, UsageError
from benchd.daemon.measuring.protocol import Job, Message, Outcome, Stage, StageName
from benchd.daemon.records import Stages, Status, UserModule

_NEEDS_AUTOGRAD = ("does not require grad and does not have a grad_fn", "nference tensor")
_WITHOUT_AUTOGRAD = (
    "benchd runs inference without autograd: remove gradients from forward, or with eager compute them under "
    "`with torch.inference_mode(False), torch.enable_grad():` from a clone of each input"
)


def leave() -> NoReturn:
    """End this process immediately after its result was sent: unloading torch would take up to a second."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk may be full
            stream.flush()
    os._exit(0)


def diagnose(error: Exception | SystemExit, job: Job | None = None) -> tuple[Status, str]:
    """Return the status and reason for an exception; print the traceback of an unexpected one.

    If the user's code raised or caused it, the reason starts with that line.
    """
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    if isinstance(error, BenchdError):
        return "failed", str(error)
    with suppress(OSError):  # the log may be on a full disk
        traceback.print_exception(error)
    text, where = _message(error), ""
    if job and job.module:
        where = _frame(error, folder_of(job.module))
    if isinstance(error, SystemExit):
        return "failed", f"{where}it ends the process with sys.exit({error.code!r}): raise an error instead"
    if where and any(words in text for words in _NEEDS_AUTOGRAD):
        return "failed", f"{where}{_WITHOUT_AUTOGRAD} (torch: {text})"
    if isinstance(error, MemoryError) or "memory" in type(error).__name__.lower() or _lacks_memory(text.lower()):
        return "failed", f"{where}out of memory: {text}"
    kind = "" if type(error).__module__.startswith("benchd.models.") else f"{type(error).__name__}: "
    return "failed", f"{where}{kind}{text}"  # benchd's own messages are clear without a class name


def folder_of(module: UserModule) -> Path:
    """Return the folder of a user's module."""
    return Path(module.folder or Path(module.where).parent)


@contextmanager
def blaming(option: str, folder: Path) -> Iterator[None]:
    """Raise UsageError, with the last line in the user's `folder`, for an exception in what `option` gave."""
    try:
        yield
    except BenchdError:
        raise
    except (Exception, SystemExit) as error:
        where = _frame(error, folder)
        raise UsageError(f"{option}: {where}{type(error).__name__}: {_message(error)}") from error


def _message(error: BaseException) -> str:
    """Return the first line, or the last one for TorchScript, whose messages start with a traceback."""
    lines = str(error).strip().splitlines() or ["no message"]
    if lines[0].startswith("operator torchvision::"):
        return f"{lines[0]}: torchvision was built for a different torch version; see `benchd doctor`"
    if lines[0].startswith("attempted relative import"):
        return f"{lines[0]}: name the package instead of the file, as in --module package.module:build"
    return lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]


def _frame(error: BaseException, folder: Path) -> str:
    """Return the last line in the user's folder that led to the error or its cause; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of(frame.filename, folder)]
    if frames:
        last = frames[-1]
        return f"{Path(last.filename).name}:{last.lineno}: in {last.name}: {last.line}: "
    return _frame(error.__cause__, folder) if error.__cause__ else ""


def _is_of(file: str, folder: Path) -> bool:
    path = Path(file)
    return folder in path.parents and not {"site-packages", "dist-packages"} & set(path.parts)


def _lacks_memory(text: str) -> bool:
    """Return whether a lower-case error text means out of memory; failed assertions in an allocator do not."""
    return "out of memory" in text or ("alloc" in text and "internal assert" not in text)


def send(pipe: BinaryIO, message: Message) -> None:
    """Write one message as a JSON line."""
    pipe.write(msgspec.json.encode(message) + b"\n")


class StageClock:
    """Reports each stage to the supervisor and adds up its time; a line from `permits` ends a wait for the turn."""

    def __init__(self, pipe: BinaryIO, job: Job, permits: BinaryIO | None = None) -> None:
        self._pipe, self._permits = pipe, permits
        self._current: StageName | None = None
        self._done = ""
        self._started_ns = time.monotonic_ns()
        self.seconds: dict[str, float] = {"spawn_s": (self._started_ns - job.spawned_ns) / 1e9}

    def enter(self, name: StageName, done: str = "") -> None:
        """End the current stage and begin this one; `done` says how long it is silent, or how far it is."""
        self.leave()
        self._current, self._done, self._started_ns = name, done, time.monotonic_ns()
        send(self._pipe, Stage(name, done))

    def wait_for_turn(self, then: StageName | None = None) -> None:
        """End the current stage, report that this process is waiting, and wait for its turn; stage `then` follows."""
        self.leave()
        send(self._pipe, Stage("ready"))
        if self._permits:
            self._permits.readline()
        if then:
            self.enter(then, self._done)

    def go_on(self, done: str = "") -> None:
        """Report the progress of the stage, which restarts its deadline unless it is a check."""
        if self._current:
            send(self._pipe, Stage(self._current, done or self._done))

    def keep(self, outcome: Outcome) -> None:
        """Send the results so far, which count even if a later stage does not finish."""
        outcome.process.stages = self.stages()
        send(self._pipe, msgspec.structs.replace(outcome, is_partial=True))

    def leave(self) -> None:
        """End the current stage."""
        if self._current:
            name = f"{self._current}_s"
            self.seconds[name] = self.seconds.get(name, 0.0) + (time.monotonic_ns() - self._started_ns) / 1e9
            self._current = None

    def stages(self) -> Stages:
        """Return the durations of the stages so far."""
        return Stages(**self.seconds)

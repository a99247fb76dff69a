"""The worker's side of the pipe: which stage runs, and how long each took."""

import time
from typing import BinaryIO

import msgspec

from benchd.daemon.measuring.protocol import Job, Message, Stage, StageName
from benchd.daemon.records import Stages


def send(pipe: BinaryIO, message: Message) -> None:
    """Write one message as a JSON line."""
    pipe.write(msgspec.json.encode(message) + b"\n")


class StageClock:
    """Announces each stage to the supervisor and keeps how long it took, all its times together."""

    def __init__(self, pipe: BinaryIO, job: Job) -> None:
        self._pipe = pipe
        self._current: StageName | None = None
        self._started_ns = time.monotonic_ns()
        self.seconds: dict[str, float] = {"spawn_s": (self._started_ns - job.spawned_ns) / 1e9}

    def enter(self, name: StageName) -> None:
        """End the stage that runs and begin this one."""
        self.leave()
        self._current, self._started_ns = name, time.monotonic_ns()
        send(self._pipe, Stage(name))

    def go_on(self, percent: int) -> None:
        """Say that so much of the stage is done: its deadline begins anew."""
        if self._current:
            send(self._pipe, Stage(self._current, percent))

    def leave(self) -> None:
        """End the stage that runs."""
        if self._current:
            name = f"{self._current}_s"
            self.seconds[name] = self.seconds.get(name, 0.0) + (time.monotonic_ns() - self._started_ns) / 1e9
            self._current = None

    def stages(self) -> Stages:
        """Return the stages so far."""
        return Stages(**self.seconds)

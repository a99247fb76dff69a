"""Waiting for what a test has brought about: never a moment, always the event itself."""

import time
from collections.abc import Callable
from subprocess import Popen
from typing import Any

WAIT_S = 300.0  # after so long nothing more is expected to happen: a hang, not a slow machine


def wait_for(
    condition: Callable[[], object],
    process: "Popen[Any] | None" = None,
    why: str = "it did not happen",
    step_s: float = 0.02,
) -> None:
    """Return once `condition()` holds; fail if `process` ends before. What is dear to ask has a longer step."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert process is None or process.poll() is None, f"{why}: the process ended with {process.returncode}"
        assert time.monotonic() < deadline, why
        time.sleep(step_s)

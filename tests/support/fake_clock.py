"""Clocks of processes that a test sets and lets run: fake_clock.c compiled, and its offsets."""

import os
import struct
import subprocess
from pathlib import Path

from broker import program

SOURCE = Path(__file__).with_name("fake_clock.c")


class FakeClock:
    """The clocks of all processes that are started with `environment`; those of the test are left alone."""

    def __init__(self, folder: Path) -> None:
        library, self._offsets = folder / "fake_clock.so", folder / "offsets"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
        subprocess.run([program(os.environ.get("CC", "cc")), *flags, "-o", library, SOURCE], check=True)
        self.environment = {"LD_PRELOAD": str(library), "FAKE_CLOCK": str(self._offsets)}
        self.set(0.0)

    def set(self, wall_s: float, monotonic_s: float = 0.0) -> None:
        """Set the clocks, at once, to so much from the true time."""
        self._ahead_s = wall_s, monotonic_s
        with self._offsets.open("r+b" if self._offsets.exists() else "wb") as file:
            file.write(struct.pack("dd", wall_s, monotonic_s))

    def move(self, seconds: float) -> None:
        """Let so much time pass at once on all clocks."""
        wall_s, monotonic_s = self._ahead_s
        self.set(wall_s + seconds, monotonic_s + seconds)

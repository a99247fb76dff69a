"""A machine with systemd as its first process, booted in namespaces of its own by boot.sh: root alone may do that."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from broker import program
from waiting import WAIT_S

BOOT = Path(__file__).parent / "boot.sh"
SYSTEMD = Path(os.environ.get("BENCHD_USERLAND") or "/", "lib/systemd/systemd")
HANG_S = 3600.0  # an install of a minute takes ten where others compute too
NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup")


class Machine:
    """What runs in there; `leader` is its first process as it is seen from here."""

    def __init__(self, leader: int) -> None:
        self._enter = ["nsenter", f"--target={leader}", *NAMESPACES, "--root", "--wd"]

    def run(self, *command: str, code: int = 0, stdin: str = "") -> str:
        """Run a command in there to its end; return what it printed."""
        done = self._run(command, stdin)
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def succeeds(self, *command: str) -> bool:
        """Run a command in there and say whether it succeeded."""
        return self._run(command).returncode == 0

    def _run(self, command: tuple[str, ...], stdin: str = "") -> "subprocess.CompletedProcess[str]":
        arguments = [*self._enter, *command]
        return subprocess.run(arguments, capture_output=True, text=True, check=False, input=stdin, timeout=HANG_S)

    def write(self, path: str, text: str) -> None:
        self.run("sh", "-c", 'mkdir -p "$(dirname "$0")" && cat > "$0"', path, stdin=text)

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", unit, f"--property={name}", "--value").strip()

    def until(self, condition: Callable[[], bool], unit: str) -> None:
        """Wait for a condition; where it does not come, fail with the unit's status."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(self._run(("systemctl", "status", "--no-pager", "--full", "--lines=40", unit)).stdout)
            time.sleep(0.02)


@contextmanager
def booted(folder: Path, *sources: Path) -> Iterator[Machine]:
    """Yield a machine that shows `sources` under /srv; skip where this one cannot boot it. `folder` is empty."""
    if os.geteuid() != 0 or not SYSTEMD.exists():
        pytest.skip("needs root and systemd to boot a machine of its own")
    with _cgroup() as group, (folder.with_suffix(".log")).open("w+") as log:
        # before its namespace is made
        joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
        boot = [program("unshare"), *NAMESPACES, "--fork", "--kill-child", str(BOOT), str(folder), *map(str, sources)]
        with subprocess.Popen([*joined, *boot], stdout=log, stderr=log) as process:
            try:
                machine = Machine(_leader(process, log.name))
                machine.until(lambda: machine.succeeds("systemctl", "is-active", "sysinit.target"), "sysinit.target")
                yield machine
            finally:
                process.send_signal(signal.SIGKILL)


@contextmanager
def _cgroup() -> Iterator[Path]:
    """Make a group for the machine, because its systemd takes what it finds in its own for its to rule."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2" and os.access(fields[1], os.W_OK)]
    if not roots:
        pytest.skip("needs a writable cgroup2")
    group = roots[0] / f"benchd-test-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while "populated 1" in (group / "cgroup.events").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    for inner in sorted((path.parent for path in group.rglob("cgroup.procs")), reverse=True):
        inner.rmdir()


def _leader(process: "subprocess.Popen[bytes]", log: str) -> int:
    """Return the first process of the new namespaces once systemd runs in it; skip where it ends before."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.skip(f"this machine cannot boot another: {Path(log).read_text().strip()}")
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.Error):  # it has just ended
                if child.name() == "systemd":
                    return child.pid
        time.sleep(0.02)
    pytest.fail("systemd did not begin")

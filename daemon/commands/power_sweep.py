"""`sudo benchd power-sweep`: one run of bench-once in each of a Jetson's power modes, then back to the former mode.

Modes are nvpmodel's, by the names in its own file. Only switching needs root: bench-once runs as the user who called
sudo. A mode that wants a reboot is passed over by name; nvpmodel asks first and gets a no.
"""

import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import names
from benchd.daemon.errors import NotAvailable, UsageError, unknown
from benchd.daemon.machine.sysfs import text

BENCH_ONCE = Path(sys.executable).with_name("bench-once")
CONFIGURATION = Path("etc/nvpmodel.conf")
TOOL_TIMEOUT_S = 60.0
IN_FORCE_TIMEOUT_S = 15.0
POLL_S = 0.2
WANTS_REBOOT = "Reboot required"  # as nvpmodel of L4T 35 and 36 puts it
EXIT_CODES = (130, 2, 7, 6, 1, 5, 3, 4)  # where several hold, the first
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last when a remote shell goes away

app = application()

_MODEL = re.compile(r"^\s*<\s*POWER_MODEL\b([^>]*)>", re.MULTILINE)
_CURRENT = re.compile(r"^NV Power Mode: *(\S.*?) *\n *(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Mode:
    """A power mode of this board: nvpmodel's number for it, and the name."""

    number: int
    name: str


@app.command("power-sweep", epilog="Example: sudo benchd power-sweep --modes 15W,25W -- --models vim_tiny")
def power_sweep(
    modes: Annotated[str, typer.Option(help="Power modes by nvpmodel's names.", metavar="15W,25W,MAXN")],
    case: Annotated[list[str], typer.Argument(help="Options of bench-once.", metavar="-- OPTIONS")],
) -> None:
    """Measure the same cases in several power modes of a Jetson.

    The original mode is always restored.
    """
    raise typer.Exit(run(names(modes), [str(BENCH_ONCE), *case], sys.stdout))


def run(modes: Sequence[str], command: Sequence[str], out: TextIO, root: Path = Path("/")) -> int:
    """Run `command` in each named mode and return the exit code of all of them together.

    `command` is bench-once with its arguments. The former mode is back in force when this returns or raises. Raises
    UsageError for a name that the board lacks, and NotAvailable where nvpmodel is absent or fails.
    """
    return _Sweep(_chosen(modes, read_modes(root)), command, out).run()


def read_modes(root: Path = Path("/")) -> list[Mode]:
    """Return the modes in nvpmodel's file; raise NotAvailable where there is none."""
    content = text(root / CONFIGURATION)
    if content is None:
        raise NotAvailable(f"{root / CONFIGURATION} cannot be read; power modes are a Jetson's, set by nvpmodel")
    headers = [dict(re.findall(r"(\w+)=(\S+)", header)) for header in _MODEL.findall(content)]
    return [Mode(int(header["ID"]), header["NAME"]) for header in headers if {"ID", "NAME"} <= header.keys()]


def _chosen(names: Sequence[str], modes: Sequence[Mode]) -> list[Mode]:
    """Return the modes of these names; `15W` also finds MODE_15W, as AGX Orin calls it."""
    by_name = {mode.name.removeprefix("MODE_"): mode for mode in modes} | {mode.name: mode for mode in modes}
    for name in names:
        if name not in by_name:
            raise unknown("power mode", name, [mode.name for mode in modes])
    if not names:
        raise UsageError(f"name at least one power mode: {', '.join(mode.name for mode in modes)}")
    return [by_name[name] for name in names]


class _Sweep:
    """The modes one after the other; a signal ends the running command and then the sweep."""

    def __init__(self, modes: Sequence[Mode], command: Sequence[str], out: TextIO) -> None:
        self._modes = modes
        self._command = command
        self._out = out
        self._interrupted = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        with _signals(self._interrupt), self._former_mode_after():
            codes = [self._in_mode(mode) for mode in self._modes if not self._interrupted]
        if self._interrupted:
            return 130
        return next((code for code in EXIT_CODES if code in codes), max(codes))

    @contextmanager
    def _former_mode_after(self) -> Iterator[None]:
        former = current()
        try:
            yield
        finally:
            _restore(former)
            self._say(f"{former.name} is in force, as before")

    def _in_mode(self, mode: Mode) -> int:
        if not _switch(mode):
            self._say(f"{mode.name} left out: it wants a reboot (sudo nvpmodel -m {mode.number})")
            return 7
        self._say(f"{mode.name} is in force")
        return self._measure()

    def _measure(self) -> int:
        """Run the command as the invoking user and return its exit code, 1 where a signal ended it."""
        with subprocess.Popen(self._command, **_invoking_user(os.environ)) as child:
            self._child = child
            if self._interrupted:  # before there was a child to tell
                child.terminate()
            code = child.wait()
        return code if code >= 0 else 1

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def _say(self, line: str) -> None:
        self._out.write(f"power-sweep: {line}\n")
        self._out.flush()  # before the child's own lines


def current() -> Mode:
    """Return the mode in force; raise NotAvailable where nvpmodel does not tell."""
    found = _CURRENT.search(_nvpmodel("-q"))
    if found is None:
        raise NotAvailable("nvpmodel -q does not tell the power mode")
    return Mode(int(found[2]), found[1])


def _switch(mode: Mode) -> bool:
    """Put a mode in force and wait until it is; return False, with nothing changed, where it wants a reboot."""
    if current().number == mode.number:  # asked for the mode it is in, nvpmodel may want a reboot
        return True
    if WANTS_REBOOT in _nvpmodel("-m", str(mode.number)):
        return False
    deadline = time.monotonic() + IN_FORCE_TIMEOUT_S
    while current().number != mode.number:
        if time.monotonic() > deadline:
            raise NotAvailable(f"{mode.name} is not in force {IN_FORCE_TIMEOUT_S:g} s after nvpmodel -m {mode.number}")
        time.sleep(POLL_S)
    return True


def _restore(former: Mode) -> None:
    by_hand = f"to go back to {former.name}: sudo nvpmodel -m {former.number}"
    try:
        restored = _switch(former)
    except NotAvailable as error:
        raise NotAvailable(f"{error}; {by_hand}") from error
    if not restored:
        raise NotAvailable(f"going back wants a reboot; {by_hand}")


def _nvpmodel(*arguments: str) -> str:
    """Return what nvpmodel prints; raise NotAvailable where it is absent or fails for anything but a reboot."""
    command = ["nvpmodel", *arguments]
    try:
        # in a session of its own: a Ctrl-C must not end it halfway
        done = subprocess.run(
            command,
            input="no\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=TOOL_TIMEOUT_S,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise NotAvailable("nvpmodel is not on the PATH; power modes are a Jetson's") from None
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"{' '.join(command)} did not end within {TOOL_TIMEOUT_S:g} s") from None
    printed = done.stdout + done.stderr
    if done.returncode and WANTS_REBOOT not in printed:
        last = (printed.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NotAvailable(f"{' '.join(command)} failed: {last}; switching modes needs root: sudo benchd power-sweep")
    return printed


def _invoking_user(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments that make a child that of the user who called sudo; none where nobody did."""
    if os.geteuid() != 0 or not {"SUDO_UID", "SUDO_GID"} <= variables.keys():
        return {}
    user, group = int(variables["SUDO_UID"]), int(variables["SUDO_GID"])
    entry = pwd.getpwuid(user)
    own = {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
    kept = {name: value for name, value in variables.items() if not name.startswith(("SUDO_", "XDG_"))}
    groups = os.getgrouplist(entry.pw_name, group)
    return {"user": user, "group": group, "extra_groups": groups, "env": kept | own}


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    old = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, former in old.items():
            signal.signal(number, former)

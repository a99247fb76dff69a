"""Runs a command in each of a Jetson's power modes, then restores the original mode.

The modes and their names come from nvpmodel's file. Only switching requires root: the command runs as the user who
called sudo. A mode that needs a reboot is skipped with a message; nvpmodel asks before it reboots, and the answer is
no.
"""

import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from benchd.daemon.errors import EXIT_CODES, NotAvailable, UsageError, unknown
from benchd.daemon.machine.signals import ending, on_signals
from benchd.daemon.machine.sysfs import text

CONFIGURATION = Path("etc/nvpmodel.conf")
TOOL_TIMEOUT_S = 60.0
IN_FORCE_TIMEOUT_S = 15.0
POLL_S = 0.2
WANTS_REBOOT = "Reboot required"  # nvpmodel's wording in L4T 35 to 38

_MODEL = re.compile(r"^\s*<\s*POWER_MODEL\b([^>]*)>", re.MULTILINE)
_WATTS = re.compile(r"(\d+)W")
_CURRENT = re.compile(r"^NV Power Mode: *(\S.*?) *\n *(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Mode:
    """A power mode of this board: nvpmodel's number and name."""

    number: int
    name: str


def run(modes: Sequence[str], command: Sequence[str], out: TextIO, root: Path = Path("/"), made: str = "") -> int:
    """Run `command`, with `{mode}` replaced by the mode's name, in each of the modes; return their combined exit code.

    A mode is skipped if `made`, a path that may contain `{mode}`, already exists. The original mode is restored when
    this returns or raises. Raises UsageError for a mode that the board lacks or if no mode is left, and NotAvailable if
    nvpmodel is absent or fails.
    """
    chosen = _chosen(modes, read_modes(root))
    existing = {mode: path for mode in chosen if (path := Path(_of(mode, made))).is_file()}
    if existing.keys() >= set(chosen):
        raise UsageError(f"already built: {', '.join(map(str, existing.values()))}; delete to rebuild")
    sweep = _Sweep([mode for mode in chosen if mode not in existing], command, out)
    for mode, path in existing.items():
        sweep.say(f"{mode.name} skipped: {path} already exists")
    return sweep.run()


def _of(mode: Mode, pattern: str) -> str:
    return pattern.replace("{mode}", mode.name)


def read_modes(root: Path = Path("/")) -> list[Mode]:
    """Return the modes in nvpmodel's file; raise NotAvailable if it cannot be read."""
    content = text(root / CONFIGURATION)
    if content is None:
        raise NotAvailable(f"{root / CONFIGURATION} cannot be read; only a Jetson has power modes, which nvpmodel sets")
    headers = [dict(re.findall(r"(ID|NAME)=(\S+)", header)) for header in _MODEL.findall(content)]
    return [
        Mode(int(header["ID"]), header["NAME"])
        for header in headers
        if header.get("ID", "").isdecimal() and "NAME" in header
    ]


def fastest(modes: Sequence[Mode]) -> Mode | None:
    """Return a board's fastest mode, judging by the names: unlimited, else with the most watts; None without modes."""
    watts = {mode: int(match[1]) for mode in modes if (match := _WATTS.search(mode.name))}
    unlimited = [mode for name in ("MAXN_SUPER", "MAXN") for mode in modes if mode.name == name]
    return unlimited[0] if unlimited else max(watts, key=lambda mode: watts[mode], default=None)


def _chosen(names: Sequence[str], modes: Sequence[Mode]) -> list[Mode]:
    """Return the modes with these names; `15W` also matches MODE_15W, as it is called on AGX Orin."""
    by_name = {mode.name.removeprefix("MODE_"): mode for mode in modes} | {mode.name: mode for mode in modes}
    for name in names:
        if name not in by_name:
            raise unknown("power mode", name, [mode.name for mode in modes])
    if not names:
        raise UsageError(f"give at least one power mode: {', '.join(mode.name for mode in modes)}")
    return [by_name[name] for name in names]


class _Sweep:
    """Runs the modes in turn; a signal ends the running command and then the sweep."""

    def __init__(self, modes: Sequence[Mode], command: Sequence[str], out: TextIO) -> None:
        self._modes = modes
        self._command = command
        self._out = out
        self._interrupted = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        with on_signals(ending(), self._interrupt):
            former = current()
            try:
                codes = [self._in_mode(mode) for mode in self._modes if not self._interrupted]
            finally:
                _restore(former)
                self.say(f"{former.name} is active, as before")
        if self._interrupted:
            return 130
        return next((code for code in EXIT_CODES if code in codes), max(codes))

    def _in_mode(self, mode: Mode) -> int:
        if not _switch(mode):
            self.say(f"{mode.name} skipped: it needs a reboot (sudo nvpmodel -m {mode.number})")
            return 7
        self.say(f"{mode.name} is active")
        return self._measure([_of(mode, part) for part in self._command])

    def _measure(self, command: Sequence[str]) -> int:
        """Run the command as the invoking user and return its exit code, 1 if a signal ended it."""
        with subprocess.Popen(command, **_invoking_user(os.environ)) as child:
            self._child = child
            if self._interrupted:  # the signal arrived before there was a child
                child.terminate()
            code = child.wait()
        return code if code >= 0 else 1

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def say(self, line: str) -> None:
        """Write a line, marked as ours."""
        self._out.write(f"power modes: {line}\n")
        self._out.flush()  # so that it precedes the child's output


def current() -> Mode:
    """Return the active mode; raise NotAvailable if nvpmodel does not report it."""
    match = _CURRENT.search(_nvpmodel("-q"))
    if match is None:
        raise NotAvailable("nvpmodel -q does not report the power mode")
    return Mode(int(match[2]), match[1])


def _switch(mode: Mode) -> bool:
    """Activate a mode and wait until it is active; return False, with nothing changed, if it needs a reboot."""
    if current().number == mode.number:  # nvpmodel may ask for a reboot even for the active mode
        return True
    if WANTS_REBOOT in _nvpmodel("-m", str(mode.number)):
        return False
    deadline = time.monotonic() + IN_FORCE_TIMEOUT_S
    while current().number != mode.number:
        if time.monotonic() > deadline:
            raise NotAvailable(f"{mode.name} is not active {IN_FORCE_TIMEOUT_S:g} s after nvpmodel -m {mode.number}")
        time.sleep(POLL_S)
    return True


def _restore(former: Mode) -> None:
    by_hand = f"to restore {former.name}: sudo nvpmodel -m {former.number}"
    try:
        restored = _switch(former)
    except NotAvailable as error:
        raise NotAvailable(f"{error}; {by_hand}") from error
    if not restored:
        raise NotAvailable(f"restoring the original mode needs a reboot; {by_hand}")


def _nvpmodel(*arguments: str) -> str:
    """Return nvpmodel's output; raise NotAvailable if it is absent, or fails for any reason other than a reboot."""
    command = ["nvpmodel", *arguments]
    try:
        # in its own session, so that Ctrl-C cannot stop it halfway
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
        raise NotAvailable("nvpmodel is not on the PATH; only a Jetson has power modes") from None
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"{' '.join(command)} did not finish within {TOOL_TIMEOUT_S:g} s") from None
    printed = done.stdout + done.stderr
    if done.returncode and WANTS_REBOOT not in printed:
        last = (printed.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        # with its path: sudo does not search a virtual environment
        as_root = f"sudo {Path(sys.executable).with_name('benchd')}"
        raise NotAvailable(f"{' '.join(command)} failed: {last}; switching modes requires root: {as_root}")
    return printed


def _invoking_user(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the Popen arguments that run a child as the user who called sudo; empty without sudo."""
    if os.geteuid() != 0 or not {"SUDO_UID", "SUDO_GID"} <= variables.keys():
        return {}
    user, group = int(variables["SUDO_UID"]), int(variables["SUDO_GID"])
    entry = pwd.getpwuid(user)
    own = {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
    inherited = {name: value for name, value in variables.items() if not name.startswith(("SUDO_", "XDG_"))}
    groups = os.getgrouplist(entry.pw_name, group)
    return {"user": user, "group": group, "extra_groups": groups, "env": inherited | own}

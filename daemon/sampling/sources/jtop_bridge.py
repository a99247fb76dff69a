"""Writes what the jtop service tells as JSON lines: `PYTHON -I jtop_bridge.py INTERVAL_S`, for samplers/jtop.py.

A process of its own because jetson-stats is AGPL-3.0 and nothing of ours may be one program with it, because it is
installed for the system's Python and not for ours, and because `import jtop` may change how a process starts its
children. So this file needs no other of benchd, only the standard library of Python 3.8 or newer. Standard output
carries readings {"type": "reading", "uptime_s", "interval_s", "total", "values"} and at last {"type": "end", "reason"};
the end of standard input is the end of this process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

UCSI = "/sys/class/power_supply/ucsi-source-psy-"
CHECK_S = 1.0


def main() -> None:
    """Write readings until jtop fails or standard input ends."""
    out = _claim_stdout()
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        _follow(out, float(sys.argv[1]))
    except Exception as error:  # the parent names it; there is nobody else to tell
        _write(out, {"type": "end", "reason": _reason(error)})


def _claim_stdout() -> TextIO:
    """Return a file for messages alone; what jtop prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def _write(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message, allow_nan=False) + "\n")
    out.flush()


def _follow(out: TextIO, interval_s: float) -> None:
    """Connect and write each reading; raise what ends the connection."""
    client = import_module("jtop").jtop(interval=interval_s)
    client.attach(_Readings(out))
    client.start()
    # Not client.ok() as its manual has it: that gives up after three intervals of those asked for, although another
    # client may have set a slower one before. The parent watches for silence.
    while client.ok(spin=True):
        client.join(CHECK_S)


class _Readings:
    """Is called by jtop with each state it got, which may be an old one."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._uptime_s: float | None = None

    def __call__(self, client: Any) -> None:
        uptime_s = client.uptime.total_seconds()
        # The first may be left over from another connection; the same again means that the service is late.
        if self._uptime_s is not None and uptime_s > self._uptime_s:
            _write(self._out, _reading(client, uptime_s))
        self._uptime_s = uptime_s


def _reading(client: Any, uptime_s: float) -> dict[str, Any]:
    return {
        "type": "reading",
        "uptime_s": uptime_s,
        "interval_s": client.interval,  # the service's own, whatever was asked for
        "total": _total(client.power),
        "values": [*_rails(client.power), *_temperatures(client), *_gpu(client), *_memory(client), *_others(client)],
    }


def _total(power: dict[str, Any]) -> tuple[str, float] | None:
    """Return the rail and the watts of the total; None where jtop made it up as the sum of the rails it could read."""
    total = power.get("tot", {})
    return (total["name"], total["power"] / 1e3) if "name" in total else None


def _rails(power: dict[str, Any]) -> list[tuple[str, str, float]]:
    # Not "avg", which is no mean over time; not USB-C ports, whose figures jtop 4 shows are negotiated limits.
    rails = power.get("rail", {}).items()
    return [("power_w", name, rail["power"] / 1e3) for name, rail in rails if not Path(UCSI + name).exists()]


def _temperatures(client: Any) -> list[tuple[str, str, float]]:
    zones = client.temperature.items()
    return [("zone_temp_c", name, zone["temp"]) for name, zone in zones if zone["online"]]


def _gpu(client: Any) -> list[tuple[str, str, float]]:
    values = []
    for gpu in client.gpu.values():
        if "load" in gpu.get("status", {}):
            values.append(("gpu_utilization_percent", "", gpu["status"]["load"]))
        if "cur" in gpu.get("freq", {}):
            values.append(("gpu_clock_hz", "", gpu["freq"]["cur"] * 1e3))
    return values


def _memory(client: Any) -> list[tuple[str, str, float]]:
    ram = client.memory["RAM"]
    values = [("memory_used_bytes", "", ram["used"] * 1024)]
    if ram["shared"]:  # 0 also where it is unknown
        values.append(("nvmap_used_bytes", "", ram["shared"] * 1024))
    return values


def _others(client: Any) -> list[tuple[str, str, float]]:
    values = []
    for name, fan in client.fan.items():
        values += [("fan_speed_percent", f"{name}{i}", speed) for i, speed in enumerate(fan["speed"])]
        values += [("fan_speed_rpm", f"{name}{i}", rpm) for i, rpm in enumerate(fan.get("rpm", []))]
    if client.nvpmodel is not None:
        values.append(("nvpmodel_id", client.nvpmodel.name, client.nvpmodel.id))
    return values


def _reason(error: Exception) -> str:
    """Return what is wrong and what to do; jtop's own advice differs between its versions."""
    cause = error.__context__
    if isinstance(error, ModuleNotFoundError) and error.name == "jtop":
        install = f"sudo {sys.executable} -m pip install jetson-stats"
        return f"jetson-stats is not installed for this Python: {install}; or name the one that has it: jtop=PYTHON"
    if isinstance(cause, (FileNotFoundError, ConnectionRefusedError)):
        return "the jtop service is not running: sudo systemctl restart jtop.service"
    if isinstance(cause, PermissionError):
        return "this user is not in the group jtop: sudo usermod -aG jtop $USER, then log in again"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    main()

"""Writes the jtop service's readings as JSON lines: `PYTHON -I jtop_bridge.py INTERVAL_S`, for jtop.py.

It is a separate process because jetson-stats is AGPL-3.0 and benchd must not form one program with it, because it is
installed for the system's Python and not for benchd's, and because `import jtop` may change how a process starts its
children. This file therefore imports only the standard library of Python 3.8 or newer, and nothing from benchd. It
writes readings {"type": "reading", "uptime_s", "interval_s", "total", "values"} and finally {"type": "end", "reason"}
to standard output, and exits when standard input closes.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
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
    except Exception as error:  # the parent reports it
        _write(out, {"type": "end", "reason": _reason(error)})


def _claim_stdout() -> TextIO:
    """Return a file for messages only, after redirecting jtop's own output to standard error."""
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
    """Connect and write each reading; raise the error that ends the connection."""
    client = import_module("jtop").jtop(interval=interval_s)
    client.attach(_Readings(out))
    client.start()
    # Unlike in jtop's manual, without timeouts: client.ok() would give up after three of the requested intervals, even
    # if a different client has set a longer interval. The parent watches for silence.
    while client.ok(spin=True):
        client.join(CHECK_S)


class _Readings:
    """jtop's callback for each state; a state may be out of date."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._uptime_s: float | None = None

    def __call__(self, client: Any) -> None:
        uptime_s = client.uptime.total_seconds()
        # The first state may be left over from an earlier connection; a repeated one means that the service is late.
        if self._uptime_s is not None and uptime_s > self._uptime_s:
            _write(self._out, _reading(client, uptime_s))
        self._uptime_s = uptime_s


def _reading(client: Any, uptime_s: float) -> dict[str, Any]:
    return {
        "type": "reading",
        "uptime_s": uptime_s,
        "interval_s": client.interval,  # the service's actual interval, not the requested one
        "total": _total(client.power),
        "values": [*_rails(client.power), *_temperatures(client), *_gpu(client), *_memory(client), *_others(client)],
    }


def _total(power: dict[str, Any]) -> tuple[str, float] | None:
    """Return the rail and power (W) of the total; None if jtop only summed the rails that it could read."""
    total = power.get("tot", {})
    return (total["name"], total["power"] / 1e3) if "name" in total else None


def _rails(power: dict[str, Any]) -> list[tuple[str, str, float]]:
    # "avg" is not a mean over time, and for USB-C ports jtop 4 shows negotiated limits, so both are ignored.
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
    if ram["shared"]:  # 0 also means unknown
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
    """Return the problem and its remedy; jtop's own advice differs between versions."""
    cause = error.__context__
    if isinstance(error, ModuleNotFoundError) and error.name == "jtop":
        remedy = f"sudo {sys.executable} -m pip install jetson-stats, or"
        # for example on JetPack 7 (jetson_stats 880)
        if Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists():
            remedy = "pip is not allowed to install here, and jetson-stats' upgrade-jtop.sh uses its own environment:"
        return f"jetson-stats is not installed for this Python: {remedy} use jtop=PYTHON to name the Python that has it"
    if isinstance(cause, (FileNotFoundError, ConnectionRefusedError)):
        return "the jtop service is not running: sudo systemctl restart jtop.service"
    if isinstance(cause, PermissionError):
        return "this user is not in the group jtop: sudo usermod -aG jtop $USER, then log in again"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    main()

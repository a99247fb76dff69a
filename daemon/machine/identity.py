"""The machine's identity, which stays the same across boots and users, and the id of this boot."""

import hashlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine.sysfs import number, text

_PLACEHOLDERS = {
    "default string",
    "to be filled by o.e.m.",
    "system serial number",
    "base board serial number",
    "chassis serial number",
    "not specified",
    "not applicable",
    "not available",
    "uninitialized",
    "unknown",
    "invalid",
    "none",
    "oem",
    "n/a",
    "0123456789",
    "123456789",
    "1234567890",
    "03000200-0400-0500-0006-000700080009",
}


def device_id(configured: str | None, root: Path = Path("/")) -> str:
    """Return the configured id, else the host name and six hex digits of a hash of the board's serial number.

    The host name and /etc/machine-id do not suffice: boards flashed from one image share them. Raises UsageError for a
    configured id that cannot be a topic level.
    """
    if configured is not None:
        return checked(configured)
    host = text(root / "proc/sys/kernel/hostname") or socket.gethostname()
    slug = re.sub(r"[^a-z0-9]+", "-", host.partition(".")[0].lower()).strip("-")[:40] or "device"
    # A sandbox may hide every serial number, so that only the host name is left.
    serial = next(_serials(root), host)
    return f"{slug}-{hashlib.sha256(serial.encode()).hexdigest()[:6]}"


def checked(name: str, what: str = "device id") -> str:
    """Return the name; raise UsageError unless it is a lower-case slug of `a-z 0-9 _ -`, a valid topic level."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise UsageError(
            f"{what} {name!r}: use lower-case letters, digits, '-' and '_', starting with a letter or digit"
        )
    return name


def boot_id(root: Path = Path("/")) -> str:
    """Return the kernel's id of this boot; CLOCK_MONOTONIC stamps are comparable only within one boot."""
    identifier = text(root / "proc/sys/kernel/random/boot_id")
    if identifier is None:
        raise NotAvailable("/proc/sys/kernel/random/boot_id cannot be read; benchd needs Linux with /proc mounted")
    return identifier


def is_placeholder(value: str) -> bool:
    """Return whether this is a vendor's placeholder for a serial number or a name."""
    digits = re.sub(r"[^0-9a-z]", "", value.lower())
    return value.strip().lower() in _PLACEHOLDERS or len(set(digits)) < 2


def _serials(root: Path) -> Iterator[str]:
    """Yield candidate serial numbers of this board, best first."""
    dmi = root / "sys/class/dmi/id"
    files = [root / "proc/device-tree/serial-number", dmi / "product_uuid", dmi / "board_serial"]
    serials = [text(file) for file in files if _readable_by_all(file)]
    serials += [*_macs(root), text(root / "etc/machine-id")]
    yield from (value.lower() for value in serials if value and not is_placeholder(value))


def _readable_by_all(file: Path) -> bool:
    # A source that only root can read would give the machine one id for the service and another for a shell user.
    try:
        return bool(file.stat().st_mode & 0o004)
    except OSError:
        return False


def _macs(root: Path) -> Iterator[str | None]:
    """Yield the addresses of built-in network cards, except those set or generated at boot."""
    for card in sorted((root / "sys/class/net").glob("*")):
        device = card / "device"
        plugged_in = any(part.startswith("usb") for part in device.resolve().parts)
        if device.exists() and not plugged_in and number(card / "addr_assign_type") in (0, None):
            yield text(card / "address")

"""Starts what `benchd dashboard` and `benchd watch` were asked for, or says which package is missing."""

import sys
import uuid
from contextlib import suppress

from benchd.daemon.delivery.mqtt import Broker
from benchd.daemon.errors import NotAvailable, UsageError

PARTS = (None, "collector", "pages")


def start(broker: Broker, database: str | None, host: str, port: int, name: str | None, only: str | None) -> None:
    """Run the collector, the pages or both until a signal."""
    if only not in PARTS:
        raise UsageError(f"--only {only}: expected collector or pages")
    try:
        from benchd.dashboard import collector  # noqa: PLC0415
        from benchd.dashboard.store import default_url  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    url, name = database or default_url(), name or collector.default_name()
    if only == "collector":
        collector.run(broker, url, name)
        return
    try:
        from benchd.dashboard.app import serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    serve(broker, url, name, host, port, collect=only is None)


def show(broker: Broker, seconds: float | None) -> None:
    """Show the fleet in this terminal until Ctrl-C, or for `seconds`."""
    try:
        from benchd.dashboard.watch import watch  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    with suppress(KeyboardInterrupt):
        watch(broker, f"benchd-watch-{uuid.uuid4().hex[:12]}", sys.stdout, seconds)


def _missing(error: ModuleNotFoundError) -> NotAvailable:
    return NotAvailable(f"{error.name} is not installed: pip install 'benchd[dashboard]'")

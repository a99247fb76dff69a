"""Starts `benchd dashboard`, `benchd demo` and `benchd watch`, or reports which package is missing."""

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchd.daemon.delivery.broker import Broker
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine.installed import adding

PARTS = (None, "collector", "pages")
IN_MEMORY = ("sqlite://", "sqlite:///", "sqlite:///:memory:")  # each connection to one of these has a separate database


@contextmanager
def _extra() -> Iterator[None]:
    """Report a missing package of the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotAvailable(f"{error.name} is not installed: {adding('dashboard')}") from None


def start(
    broker: Broker,
    database: str | None,
    host: str,
    port: int,
    name: str | None,
    only: str | None,
    notify: Path | None = None,
) -> None:
    """Run the collector, the pages or both until a signal; `notify` is the settings file for a collector's notices."""
    if only not in PARTS:
        raise UsageError(f"--only {only}: expected collector or pages")
    if notify and only == "pages":
        raise UsageError("--notify is for the collector: leave it out with --only pages")
    if database in IN_MEMORY:
        raise UsageError(f"--database {database}: the collector and the pages must share a file, sqlite:///PATH")
    with _extra():
        from benchd.dashboard import collector, notices  # noqa: PLC0415
        from benchd.dashboard.store import default_url  # noqa: PLC0415
    url, name = database or default_url(), name or collector.default_name()
    settings = notices.read(notify) if notify else None
    if only == "collector":
        collector.run(broker, url, name, settings)
        return
    with _extra():
        from benchd.dashboard.app import serve  # noqa: PLC0415
    serve(broker, url, name, host, port, collect=only is None, notify=settings)


def demonstrate(port: int) -> int:
    """Run the demo until a signal and return its exit code."""
    with _extra():
        from benchd.dashboard.demo.start import run  # noqa: PLC0415

        return run(port, sys.stderr)


def show(broker: Broker, seconds: float | None) -> None:
    """Show the fleet in this terminal until Ctrl-C, or for `seconds`."""
    with _extra():
        from benchd.dashboard.watch import watch  # noqa: PLC0415
    with suppress(KeyboardInterrupt):
        watch(broker, f"benchd-watch-{uuid.uuid4().hex[:12]}", sys.stdout, seconds)

"""`benchd dashboard`: a collector in its own process, and the pages that read what it stores."""

import multiprocessing
import os
import signal
import sys

from nicegui import app, ui

from benchd.daemon.delivery.broker import Broker
from benchd.daemon.errors import UsageError
from benchd.dashboard import collector, metrics
from benchd.dashboard.guard import Guard, is_loopback
from benchd.dashboard.store import Store
from benchd.dashboard.views import comparison, device, fleet, history, results, trade_off

TOKEN_VARIABLE = "BENCHD_DASHBOARD_TOKEN"  # noqa: S105 - the name of a variable
END_S = 10.0


def serve(broker: Broker, database: str, name: str, host: str, port: int, *, collect: bool) -> None:
    """Serve the pages until a signal; beyond the loopback interface only with a token in BENCHD_DASHBOARD_TOKEN."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if not is_loopback(host) and token is None:
        raise UsageError(f"--host {host}: access from other machines needs a token; set {TOKEN_VARIABLE}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn stops on it and then raises it again
    store = Store(database)
    child = _start_collector(broker, database, name) if collect else None
    try:
        _add_pages(store, broker)
        metrics.add(store)
        app.add_middleware(Guard, token=token)
        app.on_startup(lambda: sys.stderr.write(f"benchd dashboard: http://{host}:{port}/\n"))
        ui.run(
            host=host,
            port=port,
            title="benchd",
            dark=None,
            reload=False,
            show=False,
            show_welcome_message=False,
            tailwind=False,
        )
    finally:
        if child is not None:
            child.terminate()
            child.join(END_S)
        store.close()


def _start_collector(broker: Broker, database: str, name: str) -> "multiprocessing.process.BaseProcess":
    child = multiprocessing.get_context("spawn").Process(target=collector.run, args=(broker, database, name))
    child.start()
    return child


def _add_pages(store: Store, broker: Broker) -> None:
    fleet.add(store)
    device.add(store, broker)
    results.add(store)
    comparison.add(store)
    history.add(store)
    trade_off.add(store)

"""`benchd dashboard`: runs a collector, and the pages that show the stored data."""

import os
import signal
import sys
import threading

from nicegui import app, ui

from benchd.daemon.delivery.broker import Broker
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import identity
from benchd.dashboard import collector, metrics
from benchd.dashboard.answers import Answers
from benchd.dashboard.changes import Changes
from benchd.dashboard.guard import Guard, is_loopback, require_free
from benchd.dashboard.notices import Settings
from benchd.dashboard.store import Store
from benchd.dashboard.views import (
    changes,
    comparison,
    device,
    fleet,
    history,
    home,
    record,
    results,
    shipped,
    trade_off,
)

TOKEN_VARIABLE = "BENCHD_DASHBOARD_TOKEN"  # noqa: S105 - the name of a variable
END_S = 5.0  # time limit for ending a collector that is still connecting


def serve(
    broker: Broker, database: str, name: str, host: str, port: int, *, collect: bool, notify: Settings | None = None
) -> None:
    """Serve the pages until a signal; beyond the loopback interface, only with a token in BENCHD_DASHBOARD_TOKEN.

    With `collect`, a collector runs in a thread and sends the notices configured in `notify`.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip() or None
    if not is_loopback(host) and token is None:
        raise UsageError(f"--host {host}: access from other machines needs a token; set {TOKEN_VARIABLE}")
    require_free(host, port)
    # uvicorn stops on the signal, and then raises the signal again
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    store, stop = Store(database), threading.Event()
    given = broker, database, identity.checked(name, "collector name"), stop, notify
    collecting = threading.Thread(target=collector.collect, args=given, name="benchd.collector", daemon=True)
    if collect:
        collecting.start()
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
            language="en-US",
            reload=False,
            show=False,
            show_welcome_message=False,
            tailwind=False,
        )
    finally:
        stop.set()
        if collect:
            collecting.join(END_S)
        store.close()


def _add_pages(store: Store, broker: Broker) -> None:
    changes_ = Changes(store)
    answers = Answers(store, changes_)
    home.add(store, answers)
    fleet.add(store, answers)
    device.add(store, broker, answers)
    changes.add(store, changes_)
    results.add(store)
    record.add(store)
    comparison.add(store, changes_)
    history.add(store)
    shipped.add(store)
    trade_off.add(store, answers)

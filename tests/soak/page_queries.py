"""What the pages ask of a store, by name: for the bench of large stores and the test of their plans."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Engine, event

from benchd.dashboard import metrics, queries
from benchd.dashboard.answers import Answers
from benchd.dashboard.changes import UPDATES, Changes
from benchd.dashboard.conditions import boards
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Filter
from benchd.dashboard.store import Store
from benchd.dashboard.views.results import csv_lines


class Statement(NamedTuple):
    """One statement as the database got it, and how long it took to answer."""

    sql: str
    values: Any
    took_s: float


def asked(store: Store, known: Result) -> dict[str, Callable[[], object]]:
    """Return what each page asks, for a store that has the result `known`."""

    def results(which: Filter, sort: str = "measured_s") -> Callable[[], object]:
        return lambda: queries.results(store, which, sort, sort == "measured_s", 0, 25)

    return {
        "results": results(Filter()),
        "of a device": results(Filter(device=known.device_id)),
        "of a model": results(Filter(model=known.model)),
        "of a variant": results(Filter(variant=known.variant)),
        "failed": results(Filter(status="failed")),
        "not checked": results(Filter(check="not checked")),
        "by median": results(Filter(), "median_ms"),
        "searched": results(Filter(text=known.model[-4:])),
        "choices": lambda: [queries.choices(store, name) for name in ("device_id", "model", "variant", "status")],
        "history": lambda: queries.history(store, known.device_id, known.case_id, 200),
        "trade-off": lambda: Answers(store, Changes(store)).newest(),
        "changes": lambda: [Changes(store).update(since) for since in (*UPDATES, "2026-01-01")],
        "record": lambda: queries.result(store, known.key),
        "names": lambda: queries.names(store),
        "fleet": lambda: queries.fleet(store, time.time()),
        "device": lambda: queries.marks(store, known.device_id, time.time() - 300),
        "live": lambda: queries.series(store, known.device_id, time.time() - 300),
        "home": lambda: boards(store, Answers(store, Changes(store)).update()[0], time.time()),
        "metrics": lambda: list(metrics.Fleet(store, time.time()).collect()),
        "missing": lambda: queries.gaps(store),
        "csv": lambda: list(csv_lines(store, Filter())),
        "csv of a device": lambda: list(csv_lines(store, Filter(device=known.device_id))),
    }


@contextmanager
def noted(engine: Engine) -> Iterator[list[Statement]]:
    """Yield a list of the statements that this thread executes meanwhile; their rows are read after that time."""
    statements: list[Statement] = []
    begun_s: list[float] = []
    thread = threading.get_ident()  # telemetry is stored beside it

    def before(connection: object, cursor: object, sql: str, values: object, *_: object) -> None:
        if threading.get_ident() == thread:
            begun_s.append(time.perf_counter())

    def after(connection: object, cursor: object, sql: str, values: object, *_: object) -> None:
        if threading.get_ident() == thread:
            statements.append(Statement(sql, values, time.perf_counter() - begun_s.pop()))

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", after)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", before)
        event.remove(engine, "after_cursor_execute", after)

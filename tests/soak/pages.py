"""The pages of a large store: when each is first painted and filled, which statement takes long, what a viewer is sent.

`make bench-pages` fills a store with the results of a fleet, runs what the pages ask, then serves them to a Chromium
while every board sends its telemetry. Exit code 1 beyond a target.
"""

import json
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from sqlalchemy import text

from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine import environment
from benchd.daemon.records import Case, Environment, Variant, encode
from benchd.dashboard import queries
from benchd.dashboard.messages import Result, rows
from benchd.dashboard.store import RAW_S, Store
from benchmarks.commands import command
from tests.soak.collector import count, record
from tests.soak.database import postgres
from tests.soak.nodes import wait_until
from tests.soak.page_queries import Statement, asked, noted
from tests.soak.telemetry import METRICS
from tests.support.ports import HOST, answers, free_port

PAINT_S, STATEMENT_S, VIEWER_BYTES_PER_S = 1.5, 0.2, 5 * 1024
TRAFFIC_S = 20
LOADS = 3
MODELS = ("vim_tiny", "vim_small", "snn_onepass", "snn_stbif_resnet18", "square")
VARIANTS = ("eager", "fp16", "custom", "tensorrt-fp16")
CASES = [Case(model=model, variant=Variant.parse(variant)) for model in MODELS for variant in VARIANTS]
CHIPS = ("Orin Nano", "Orin AGX", "RTX 4090")
INTERVAL_S = 3600.0  # between two results of a board
NEW_SHARE = 0.9  # of the results are from before the new driver
_TURN = "CAST(substr(run_id, 2) AS INTEGER)"
_RUN = f"'r' || ({_TURN} + :step)"
_KEY = f"device_id || ':' || {_RUN}"
_LIKE = (
    f"({_TURN} < :first AND {_TURN} + :step < :turning)"
    f" OR ({_TURN} >= :turning AND {_TURN} < :turning + :first AND {_TURN} + :step < :rounds)"
)
_TELEMETRY = """WITH RECURSIVE seconds(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM seconds WHERE n < :last)
    INSERT INTO telemetry SELECT device_id, :begun_s + n, :body FROM device, seconds"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: make bench-pages ARGS='--records 100000 --postgres'")
def main(
    boards: Annotated[int, typer.Option(help="Boards of the fleet.")] = 300,
    records: Annotated[int, typer.Option(help="Results of all boards together.")] = 1_000_000,
    on_postgres: Annotated[
        bool, typer.Option("--postgres", help="A PostgreSQL of its own in place of SQLite.")
    ] = False,
    keep: Annotated[Path | None, typer.Option(help="A SQLite file that is filled once and used again.")] = None,
) -> None:
    """Fill a store, print how long statements and pages take and what a viewer is sent each second."""
    with tempfile.TemporaryDirectory(prefix="benchd-pages-") as name:
        if on_postgres:
            with postgres(Path(name)) as database:
                missed = _run(database.url, Path(name), boards, records)
        else:
            missed = _run(f"sqlite:///{(keep or Path(name, 'store.db')).absolute()}", Path(name), boards, records)
    raise typer.Exit(int(missed))


def _run(url: str, folder: Path, boards: int, records: int) -> bool:
    with closing(Store(url)) as store:
        if not count(store, "device"):
            _fill(store, boards, records)
        if not count(store, "telemetry"):
            _fill_telemetry(store)
        typer.echo(f"{records:,} results of {boards:,} boards in {url.partition(':')[0]}")
        with _reporting(store, boards):
            slow = _time_statements(store)
            with _serving(url, folder) as port:
                late = _time_pages(port)
                heavy = _weigh_traffic(port)
    return slow or late or heavy


def _fill(store: Store, boards: int, records: int) -> None:
    """Store results of every board, the last tenth with a new driver: the first of each case, and then more like it."""
    begun_s, rounds, described = time.monotonic(), records // boards, environment.describe("cpu", None)
    for board in range(boards):
        store.add(row for message in _first(board, described, rounds) for row in rows(message))
    columns = [column.name for column in store.tables["result"].c if column.name != "id"]
    changed = {
        "key": _KEY,
        "run_id": _RUN,
        "arrived_s": f"arrived_s + :step * {INTERVAL_S}",
        "measured_s": f"measured_s + :step * {INTERVAL_S}",
        "median_ms": "median_ms * (1 + (:step % 17 - 8) / 1000.0)",
    }
    chosen = ", ".join(changed.get(name, name) for name in columns)
    statements = (
        f"INSERT INTO body SELECT {_KEY}, body FROM result JOIN body USING (key) WHERE {_LIKE}",  # noqa: S608 - of constants
        f"INSERT INTO result({', '.join(columns)}) SELECT {chosen} FROM result WHERE {_LIKE}",  # noqa: S608 - likewise
    )
    turning = round(NEW_SHARE * rounds)
    for step in range(len(CASES), rounds, len(CASES)):
        for statement in statements:
            with store._engine.begin() as connection:
                given = {"step": step, "first": len(CASES), "turning": turning, "rounds": rounds}
                connection.execute(text(statement), given)
    typer.echo(f"filled in {time.monotonic() - begun_s:.0f} s")


def _first(board: int, described: Environment, rounds: int) -> Iterator[IncomingMessage]:
    """Yield who a board is, and the first result of each of its cases before and after the new driver."""
    info = {"name": f"Board {board:03}", "site": f"hall {board % 5}", "environment": msgspec.to_builtins(described)}
    for kind, body in {"info": info, "health": {"activity": "idle"}, "status": {"state": "online"}}.items():
        yield _said(board, kind, body)
    now_s, turning = time.time(), round(NEW_SHARE * rounds)
    for first, driver in ((0, "550"), (turning, "560")):
        chip = CHIPS[board % len(CHIPS)]
        of = msgspec.structs.replace(described, soc=chip, driver=driver, fingerprint=f"{chip} {driver}")
        for turn, case in enumerate(CASES, first):
            at_s = now_s - (rounds - turn) * INTERVAL_S
            wall = datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            result = msgspec.structs.replace(
                record(turn, of, _name(board)), case=case, case_id=case.case_id, t_wall=wall, run_id=f"r{turn}"
            )
            yield IncomingMessage(f"benchd/v1/{_name(board)}/result/r{turn}", encode(result), at_s)


def _fill_telemetry(store: Store) -> None:
    """Store what the boards have reported in the last hour, each every second."""
    body = json.dumps({name: high for name, (_, high) in METRICS.items()}).encode()
    given = {"body": body, "begun_s": int(time.time() - RAW_S), "last": round(RAW_S) - 1}
    with store._engine.begin() as connection:
        connection.execute(text(_TELEMETRY), given)


def _name(board: int) -> str:
    return f"board-{board:03}"


def _said(board: int, kind: str, body: object, at_s: float | None = None) -> IncomingMessage:
    return IncomingMessage(f"benchd/v1/{_name(board)}/{kind}", json.dumps(body).encode(), at_s or time.time())


@contextmanager
def _reporting(store: Store, boards: int) -> Iterator[None]:
    """Store the telemetry that every board sends each second, as a collector does, until the block ends."""
    stop, chance = threading.Event(), random.Random(0)

    def report() -> None:
        while not stop.wait(1.0):
            messages = [_said(board, "telemetry", {"samples": _samples(chance)}) for board in range(boards)]
            store.add(row for message in messages for row in rows(message))

    thread = threading.Thread(target=report, name="reporting")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _samples(chance: random.Random) -> list[list[object]]:
    return [[0, name, chance.uniform(*value), "simulated"] for name, value in METRICS.items()]


def _time_statements(store: Store) -> bool:
    """Print the slowest statement of what each page asks, with its plan if it is too slow; return if any was."""
    is_slow = False
    for name, ask in asked(store, _newest(store)).items():
        # the best of several, because other work on the machine only delays
        statements = min((_statements(store, ask) for _ in range(LOADS)), key=_longest_s)
        worst = max(statements, key=lambda statement: statement.took_s)
        typer.echo(f"{name}: {len(statements)} statements, the slowest {1e3 * worst.took_s:.0f} ms")
        if worst.took_s > STATEMENT_S:
            is_slow = True
            typer.echo(f"{worst.sql}\n{_plan(store, worst.sql, worst.values)}")
    return is_slow


def _statements(store: Store, ask: Callable[[], object]) -> list[Statement]:
    with noted(store._engine) as statements:
        ask()
    return statements


def _longest_s(statements: Sequence[Statement]) -> float:
    return max(statement.took_s for statement in statements)


def _newest(store: Store) -> Result:
    return queries.results(store, queries.Filter(), "measured_s", True, 0, 1).results[0]


def _plan(store: Store, sql: str, values: Any) -> str:
    with store.reading() as connection:
        explain = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN ANALYZE"
        return "\n".join(f"  {row[-1]}" for row in connection.exec_driver_sql(f"{explain} {sql}", values))


@contextmanager
def _serving(url: str, folder: Path) -> Iterator[int]:
    port = free_port()
    options = ["--only", "pages", "--mqtt", f"mqtt://{HOST}:1", "--database", url, "--port", str(port)]
    with subprocess.Popen(command("benchd", "dashboard", *options), cwd=folder) as process:
        try:
            wait_until(lambda: answers(port), "the start of the pages")
            yield port
        finally:
            process.terminate()


def _time_pages(port: int) -> bool:
    """Print when each page was first painted and when it had its data; return whether a paint was too late."""
    pages = {name: f"/{name}" for name in ("", "fleet", "results", "changes", "trade-off", "device/board-000")}
    is_late = False
    for load in range(LOADS):
        with _browser() as browser:
            for name, path in pages.items():
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                begun_s = time.perf_counter()
                page.goto(f"http://{HOST}:{port}{path}")
                page.get_by_text("Reading.", exact=True).wait_for(state="hidden")
                filled_s = time.perf_counter() - begun_s
                paints = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                painted_s = page.evaluate(paints) / 1e3
                is_late |= painted_s > PAINT_S
                typer.echo(
                    f"load {load + 1} of {name or 'home'}: painted {painted_s:.2f} s, with data {filled_s:.2f} s"
                )
                page.close()
    return is_late


def _weigh_traffic(port: int) -> bool:
    """Print what open pages are sent while every board reports; return whether one is sent too much."""
    is_heavy = False
    with _browser() as browser:
        for path in ("/fleet", "/", "/device/board-000"):
            heard: list[int] = []
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.on("websocket", lambda ws, heard=heard: ws.on("framereceived", lambda frame: heard.append(len(frame))))
            page.goto(f"http://{HOST}:{port}{path}")
            page.get_by_text("Reading.", exact=True).wait_for(state="hidden")
            page.wait_for_timeout(5000)
            heard.clear()
            page.wait_for_timeout(1000 * TRAFFIC_S)
            per_s = sum(heard) / TRAFFIC_S
            is_heavy |= per_s > VIEWER_BYTES_PER_S
            typer.echo(f"{path} is sent {per_s / 1024:.1f} KiB/s in {len(heard)} messages of {TRAFFIC_S} s")
            page.close()
    return is_heavy


@contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        raise NotAvailable("chromium is not installed: apt install chromium")
    with sync_playwright() as started:
        yield started.chromium.launch(executable_path=program, args=["--no-sandbox"])


if __name__ == "__main__":
    app()

"""How fast collectors take a backlog of results, and whether one that is killed loses or doubles any.

`make bench-collector` starts a mosquitto of its own with docs/integrations/broker.conf and real collectors. Exit code 1
where a result is lost or doubled.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import func, select

from benchd.daemon.delivery.broker import Broker
from benchd.daemon.delivery.connection import connect
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine import environment
from benchd.daemon.records import Case, Environment, ProcessResult, Record, Timing, encode
from benchd.dashboard.store import Store
from benchmarks.commands import command
from tests.soak.nodes import wait_until
from tests.support.ports import HOST, free_port

DEVICE = "bench-collector"
SETTINGS = Path(__file__).parents[2] / "docs/integrations/broker.conf"
PROCESSES = 3
WAIT_S = 600.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: make bench-collector ARGS='--database postgresql://me@db/empty --collectors 2 --kill'")
def main(
    records: Annotated[int, typer.Option(help="Results of the backlog.")] = 20_000,
    collectors: Annotated[int, typer.Option(help="Collectors that share it.")] = 1,
    database: Annotated[str | None, typer.Option(help="An empty one; SQLite in a temporary folder by default.")] = None,
    kill: Annotated[bool, typer.Option("--kill", help="Kill one collector in the middle and start it again.")] = False,
) -> None:
    """Publish a backlog while no collector runs, let them take it, and count what is stored."""
    names = [f"c{number}" for number in range(collectors)]
    with tempfile.TemporaryDirectory(prefix="benchd-collector-") as folder, mosquitto(Path(folder)) as broker:
        url = database or f"sqlite:///{folder}/store.db"
        with closing(Store(url)) as store:
            subscribe(store, broker, url, names)
            publish(broker, records)
            drain(store, broker, url, names, records, kill=kill)
            results, bodies = count(store, "result"), count(store, "body")
    typer.echo(f"{records:,} published, {results:,} stored, {records - results:,} lost, {bodies - results:,} doubled")
    raise typer.Exit(int(not results == bodies == records))


@contextmanager
def mosquitto(folder: Path) -> Iterator[Broker]:
    """Yield a broker that keeps its files in `folder`."""
    program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise NotAvailable("mosquitto is not installed: apt install mosquitto")
    port = free_port()
    settings = SETTINGS.read_text().replace("/var/lib/mosquitto", str(folder))
    user = "user root" if os.geteuid() == 0 else ""  # its own user cannot enter the folder
    (folder / "mosquitto.conf").write_text(f"{settings}\nlistener {port} {HOST}\nallow_anonymous true\n{user}\n")
    with subprocess.Popen([program, "-c", str(folder / "mosquitto.conf")], stderr=subprocess.DEVNULL) as process:
        try:
            yield Broker(HOST, port)
        finally:
            process.terminate()


@contextmanager
def collector(broker: Broker, database: str, name: str) -> Iterator["subprocess.Popen[bytes]"]:
    options = ["--only", "collector", "--collector", name, "--mqtt", broker.url, "--database", database]
    with subprocess.Popen(command("benchd", "dashboard", *options)) as process:
        try:
            yield process
        finally:
            process.terminate()


def subscribe(store: Store, broker: Broker, database: str, names: Sequence[str]) -> None:
    """Let the broker know the collectors' sessions, so that it keeps the backlog for them."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(collector(broker, database, name))
        wait_until(lambda: connected(store) == len(names), "the collectors' connection")


def connected(store: Store) -> int:
    """Return how many collectors have said that they are well."""
    table = store.tables["collector"]
    with store.reading() as connection:
        return int(connection.execute(select(func.count()).where(table.c.problem.is_(None))).scalar_one())


def publish(broker: Broker, total: int) -> None:
    """Hand the broker all results, as many at once as it takes."""
    topics, described, sent = Topics(DEVICE), environment.describe("cpu", None), 0
    with closing(connect(broker, "bench-publisher", time.monotonic() + WAIT_S)) as session:
        while sent < total or session.free < session.window:
            for number in range(sent, min(sent + session.free, total)):
                body = encode(record(number, described))
                session.publish(topics.result(f"r{number}"), body, 1)
                sent += 1
            session.turn(1.0)
            session.take_acknowledged()
    typer.echo(f"{total:,} results of {len(body):,} bytes wait for the collectors")


def record(number: int, described: Environment, device_id: str = DEVICE) -> Record:
    """Return a result of as many processes as `standard` has."""
    timing = Timing(median_ms=5.0, low_ms=4.9, high_ms=5.1, mean_ms=5.0, min_ms=4.8, max_ms=9.0, p99_ms=7.0, runs=700)
    case = Case(model="vim_tiny", seed=number % 100)
    return Record(
        run_id=f"r{number}",
        suite_id="s",
        device_id=device_id,
        case_id=case.case_id,
        case=case,
        status="ok",
        t_wall="2026-01-01T00:00:00.000Z",
        t_mono_ns=number,
        boot_id="b",
        tool_version="0",
        environment=described,
        timing=timing,
        processes=[ProcessResult(status="ok", timing=timing) for _ in range(PROCESSES)],
    )


def drain(store: Store, broker: Broker, database: str, names: Sequence[str], total: int, *, kill: bool) -> None:
    """Let the collectors store the backlog and print their rate, from the first result on to the last."""
    with ExitStack() as stack:
        running = [stack.enter_context(collector(broker, database, name)) for name in names]
        wait_until(lambda: count(store, "result") > 0, "the arrival of the first result")
        first, begun_s = count(store, "result"), time.monotonic()
        if kill:
            wait_until(lambda: count(store, "result") > total // 3, "the arrival of a third", within_s=WAIT_S)
            running[0].kill()
            typer.echo(f"one killed after {count(store, 'result'):,} results")
            stack.enter_context(collector(broker, database, names[0]))
        wait_until(lambda: count(store, "result") >= total, "the arrival of the last result", within_s=WAIT_S)
        rate = (total - first) / (time.monotonic() - begun_s)
    typer.echo(f"{len(names)} collector(s) into {database.partition(':')[0]}: {rate:,.0f} records/s")


def count(store: Store, table: str) -> int:
    with store.reading() as connection:
        return int(connection.execute(select(func.count()).select_from(store.tables[table])).scalar_one())


if __name__ == "__main__":
    app()

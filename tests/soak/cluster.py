"""Whether a broker of two clustered nodes, one of which is killed in the middle, costs or doubles a result.

`make soak-cluster` starts two nodes of ejabberd, devices with logs of their own, PostgreSQL and collectors. Exit
code 1 if a result is lost or doubled.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.delivery.broker import PASSWORD_VARIABLE, Broker
from benchd.daemon.delivery.connection import Connection, Terms, connect
from benchd.daemon.delivery.log import Log
from benchd.daemon.machine import environment
from benchd.daemon.records import encode
from benchd.dashboard.store import Store
from tests.soak import nodes
from tests.soak.board import serve
from tests.soak.collector import collector, connected, count, record
from tests.soak.database import postgres
from tests.soak.nodes import wait_until
from tests.support.ports import HOST

CONNECT_S = 30.0
LONGEST_S = 3600.0
_DEVICE = "import sys; from tests.soak.cluster import deliver; deliver(*sys.argv[1:])"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: make soak-cluster ARGS='--records 5000'")
def main(
    records: Annotated[int, typer.Option(help="Results of all devices together.")] = 50_000,
    devices: Annotated[int, typer.Option(help="Devices that deliver them.")] = 4,
    collectors: Annotated[int, typer.Option(help="Collectors that store them.")] = 2,
    down: Annotated[float, typer.Option(help="Seconds until the killed node is started again.")] = 10.0,
) -> None:
    """Deliver results while a node is killed and started again, and count what is stored."""
    typer.echo(f"{nodes.version()}, two nodes")
    os.environ.setdefault(PASSWORD_VARIABLE, "any")  # of the processes, too
    with tempfile.TemporaryDirectory(prefix="benchd-cluster-") as name, nodes.cluster(Path(name)) as brokers:
        probe(brokers)
        with nodes.front(brokers) as port, postgres(Path(name)) as database:
            total = records // devices * devices
            with closing(Store(database.url)) as store:
                counts = _deliver(
                    store, database.url, brokers, _broker(port), Path(name), total, devices, collectors, down
                )
    lost = total - counts[0]
    typer.echo(f"{total:,} delivered, {counts[0]:,} stored, {lost:,} lost, {counts[1] - counts[0]:,} doubled")
    raise typer.Exit(int(not counts[0] == counts[1] == total))


def _deliver(
    store: Store,
    url: str,
    brokers: Sequence[nodes.Node],
    front: Broker,
    folder: Path,
    total: int,
    devices: int,
    collectors: int,
    down_s: float,
) -> tuple[int, int]:
    """Return how many results and bodies are stored once all are there, or in the end."""
    folders = [folder / f"device-{number}" for number in range(devices)]
    with ExitStack() as stack:
        for number in range(collectors):
            stack.enter_context(collector(front, url, f"c{number}"))
        wait_until(lambda: connected(store) == collectors, "the collectors' connection")
        for path in folders:
            path.mkdir()
            stack.enter_context(device(front, path, total // devices))
        wait_until(lambda: count(store, "result") > 0, "the arrival of the first result")
        begun_s = time.monotonic()
        wait_until(lambda: count(store, "result") > total // 3, "the arrival of a third", within_s=LONGEST_S)
        brokers[0].kill()
        typer.echo(f"a node killed after {count(store, 'result'):,} results, {time.monotonic() - begun_s:.0f} s")
        time.sleep(down_s)
        brokers[0].start()
        typer.echo(f"started again; {count(store, 'result'):,} results")
        wait_until(
            lambda: count(store, "result") >= total,
            "the arrival of the last result",
            within_s=LONGEST_S,
        )
        typer.echo(f"{total / (time.monotonic() - begun_s):,.0f} records/s, the kill included")
        return count(store, "result"), count(store, "body")


@contextmanager
def device(broker: Broker, folder: Path, results: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield the process of a device that delivers its results until it is ended."""
    command = [sys.executable, "-c", _DEVICE, broker.url, str(folder), str(results)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


def deliver(url: str, path: str, results: str) -> None:
    """Append results to a log and deliver them as the service does, until SIGTERM."""
    device_id, described = Path(path).name, environment.describe("cpu", None)

    def append(log: Log) -> bool:
        for number in range(log.last_seq, int(results)):
            log.append(encode(record(number, described, device_id)))
        return False

    serve(url, path, device_id, append, 0.05)


def probe(brokers: Sequence[nodes.Node]) -> None:
    """Print what the cluster does with groups of subscribers, retained messages and sessions."""
    first, second = (_broker(node.port) for node in brokers)
    with closing(_connection(first)) as connection:
        typer.echo(f"shared subscriptions: {_word(connection.shares)}")
        _put(connection, "probe/retained", retain=True)
    for place, node in (("its", first), ("the other", second)):
        with closing(_connection(node)) as connection:
            connection.subscribe([("probe/retained", 1)])
            connection.wait_subscribed(time.monotonic() + CONNECT_S)
            typer.echo(f"a retained message at {place} node: {_word(_hears(connection))}")
    with closing(_connection(first, "probe", 60)) as connection:
        connection.subscribe([("probe/kept", 1)])
        connection.wait_subscribed(time.monotonic() + CONNECT_S)
    with closing(_connection(first)) as connection:
        _put(connection, "probe/kept")
    with closing(_connection(second, "probe", 60)) as connection:
        typer.echo(f"a session with its messages moves to the other node: {_word(_hears(connection))}")


def _broker(port: int) -> Broker:
    return Broker(HOST, port, user="soak", password=os.environ[PASSWORD_VARIABLE])


def _connection(broker: Broker, client_id: str = "probe-other", keep_s: int = 0) -> Connection:
    return connect(broker, client_id, time.monotonic() + CONNECT_S, Terms(keep_s=keep_s))


def _put(connection: Connection, topic: str, *, retain: bool = False) -> None:
    connection.publish(topic, b"{}", 1, retain=retain)
    while connection.free < connection.window:
        connection.turn(1.0)


def _hears(connection: Connection) -> bool:
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        connection.turn(0.1)
        if connection.take_received():
            return True
    return False


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


if __name__ == "__main__":
    app()

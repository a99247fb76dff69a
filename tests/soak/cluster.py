"""Whether a broker of two clustered nodes, one of which is killed in the middle, costs or doubles a result.

`make soak-cluster` starts two nodes of ejabberd, devices with outboxes of their own, PostgreSQL and collectors. Exit
code 1 if a result is lost or doubled.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchd.daemon.delivery.broker import PASSWORD_VARIABLE, Broker, parse_url
from benchd.daemon.delivery.disk_reserve import Reserve
from benchd.daemon.delivery.link import Identity, Link
from benchd.daemon.delivery.outbox import Message, Outbox
from benchd.daemon.delivery.session import Session, Terms, connect
from benchd.daemon.delivery.topics import RESULT_QOS, Topics
from benchd.daemon.machine import environment
from benchd.daemon.records import encode
from benchd.dashboard.store import Store
from tests.soak import nodes
from tests.soak.collector import collector, connected, count, record
from tests.soak.database import postgres
from tests.soak.nodes import HOST, wait_until

CONNECT_S = 30.0
COMMITTED = 500  # results in one commit of a device
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
                found = _deliver(
                    store, database.url, brokers, _broker(port), Path(name), total, devices, collectors, down
                )
    lost = total - found[0]
    typer.echo(f"{total:,} delivered, {found[0]:,} stored, {lost:,} lost, {found[1] - found[0]:,} doubled")
    raise typer.Exit(int(not found[0] == found[1] == total))


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
    """Return how many results and bodies are stored once every device knows of all its own, or in the end."""
    outboxes = [folder / f"device-{number}.db" for number in range(devices)]
    with ExitStack() as stack:
        for number in range(collectors):
            stack.enter_context(collector(front, url, f"c{number}"))
        wait_until(lambda: connected(store) == collectors, "the collectors' connection")
        for path in outboxes:
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
            lambda: count(store, "result") >= total and is_settled(outboxes),
            "the arrival of the last result",
            within_s=LONGEST_S,
        )
        typer.echo(f"{total / (time.monotonic() - begun_s):,.0f} records/s, the kill included")
        return count(store, "result"), count(store, "body")


@contextmanager
def device(broker: Broker, outbox: Path, results: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield the process of a device that delivers its results until it is ended."""
    command = [sys.executable, "-c", _DEVICE, broker.url, str(outbox), str(results)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


def deliver(url: str, path: str, results: str) -> None:
    """Commit results to an outbox and deliver them as the service does, until SIGTERM."""
    device_id, described = Path(path).stem, environment.describe("cpu", None)
    topics = Topics(device_id)
    with Outbox(Path(path)) as outbox:
        for first in range(0, int(results), COMMITTED):
            numbers = range(first, min(first + COMMITTED, int(results)))
            bodies = {f"r{number}": encode(record(number, described, device_id)) for number in numbers}
            outbox.add_all(
                [Message(f"{device_id}:{name}", topics.result(name), RESULT_QOS, body) for name, body in bodies.items()]
            )
    ours, theirs = socket.socketpair()
    identity, reserve = Identity("boot", device_id.ljust(8, "0")), Reserve(Path(path).with_suffix(".reserve"))
    Link(parse_url(url), topics, Path(path), identity, [], theirs, reserve).start()
    while ours.recv(4096):
        pass


def is_settled(outboxes: Sequence[Path]) -> bool:
    """Return whether every device knows that all its results are stored."""
    for path in outboxes:
        with Outbox(path) as outbox:
            counts, unstored = outbox.backlog()
        if counts.pending or unstored:
            return False
    return True


def probe(brokers: Sequence[nodes.Node]) -> None:
    """Print what the cluster does with groups of subscribers, retained messages and sessions."""
    one, other = (_broker(node.port) for node in brokers)
    with closing(_session(one)) as session:
        typer.echo(f"shared subscriptions: {_word(session.shares)}")
        _put(session, "probe/retained", retain=True)
    for place, node in (("its", one), ("the other", other)):
        with closing(_session(node)) as session:
            session.subscribe([("probe/retained", 1)])
            typer.echo(f"a retained message at {place} node: {_word(_hears(session))}")
    with closing(_session(one, "probe", 60)) as session:
        session.subscribe([("probe/kept", 1)])
    with closing(_session(one)) as session:
        _put(session, "probe/kept")
    with closing(_session(other, "probe", 60)) as session:
        typer.echo(f"a session with its messages moves to the other node: {_word(_hears(session))}")


def _broker(port: int) -> Broker:
    return Broker(HOST, port, user="soak", password=os.environ[PASSWORD_VARIABLE])


def _session(broker: Broker, client_id: str = "probe-other", keep_s: int = 0) -> Session:
    return connect(broker, client_id, time.monotonic() + CONNECT_S, Terms(keep_s=keep_s))


def _put(session: Session, topic: str, *, retain: bool = False) -> None:
    session.publish(topic, b"{}", 1, retain=retain)
    while session.free < session.window:
        session.step()


def _hears(session: Session) -> bool:
    session.endure()
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        session.step(wait_s=0.1)
        if session.take_received():
            return True
    return False


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


if __name__ == "__main__":
    app()

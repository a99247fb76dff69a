"""What a store does with a fleet's telemetry at 1 Hz: messages per second, processor time, disk, and what expires.

`make bench-telemetry` takes the messages of some seconds from a fleet as fast as one collector can, then sets the
store's clock on by an hour, which leaves one a minute, and by 91 days, which deletes those.
"""

import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
import typer
from sqlalchemy import text

from benchd.daemon.delivery.connection import IncomingMessage
from benchd.dashboard.feed import BATCH
from benchd.dashboard.messages import rows
from benchd.dashboard.store import KEEP_S, RAW_S, Store
from tests.soak.collector import count
from tests.soak.database import postgres

METRICS = {  # of a GPU under load, from and to
    "power_w": (40.0, 44.0),
    "gpu_clock_hz": (1.28e9, 1.3e9),
    "gpu_temp_c": (60.0, 62.0),
    "gpu_utilization_percent": (90.0, 97.0),
    "process_rss_bytes": (7e8, 7.1e8),
    "gpu_throttle_reasons": (0.0, 0.0),
}
DAY_S = 86400.0
_SIZE = {
    "sqlite": "SELECT sum(s.pgsize) FROM dbstat s JOIN sqlite_master m ON m.name = s.name WHERE m.tbl_name = :table",
    "postgresql": "SELECT pg_total_relation_size(CAST(:table AS regclass))",
}
BEGUN_S = 1_767_225_600.0  # midnight: the messages are of one day

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Used(NamedTuple):
    """Seconds: of the clock, of this process on a processor, and of the database's processes."""

    wall_s: float
    ours_s: float
    database_s: float


@app.command(epilog="Example: make bench-telemetry ARGS='--devices 1000 --sqlite'")
def main(
    devices: Annotated[int, typer.Option(help="Devices that send a message of six samples every second.")] = 10_000,
    seconds: Annotated[int, typer.Option(help="Seconds of their telemetry.")] = 120,
    sqlite: Annotated[
        bool, typer.Option("--sqlite", help="A SQLite file in place of a PostgreSQL of its own.")
    ] = False,
) -> None:
    """Store the telemetry, thin it out, let it expire, and print what each took."""
    with tempfile.TemporaryDirectory(prefix="benchd-telemetry-") as name:
        if sqlite:
            _run(f"sqlite:///{name}/store.db", None, devices, seconds)
        else:
            with postgres(Path(name)) as database:
                _run(database.url, database.pid, devices, seconds)


def _run(url: str, pid: int | None, devices: int, seconds: int) -> None:
    with closing(Store(url)) as store:
        used = _store(store, pid, devices, seconds)
        messages, size = count(store, "telemetry"), size_bytes(store, "telemetry")
        typer.echo(f"{messages:,} messages of {devices:,} devices: {messages / used.wall_s:,.0f} per second")
        typer.echo(f"{seconds} s of telemetry in {used.wall_s:.1f} s")
        typer.echo(f"processor per second of telemetry: {_cores(used, seconds)}")
        each = size / messages
        typer.echo(
            f"{each:.0f} bytes per message, {devices * each * RAW_S / 1e9:.1f} GB for the hour that all are kept"
        )
        typer.echo(f"{devices * each * 1440 / 1e9:.1f} GB for each day of one a minute")
        tidied = _tidy(store, pid, BEGUN_S + seconds + RAW_S + 60)
        typer.echo(f"thinned out in {tidied.wall_s:.1f} s; {count(store, 'telemetry'):,} messages left")
        typer.echo(f"processor per second of telemetry: {_cores(tidied, seconds)}")
        expired = _tidy(store, pid, BEGUN_S + KEEP_S + 2 * DAY_S)
        typer.echo(f"expired in {1e3 * expired.wall_s:.0f} ms; {count(store, 'telemetry'):,} messages left")


def _store(store: Store, pid: int | None, devices: int, seconds: int) -> Used:
    """Take all messages in batches as a collector does; making them up is not counted."""
    total = Used(0.0, 0.0, 0.0)
    for second in range(seconds):
        arrived = list(_messages(devices, BEGUN_S + second))
        with _using(pid) as used:
            for first in range(0, len(arrived), BATCH):
                store.add(chain.from_iterable(map(rows, arrived[first : first + BATCH])))
        total = Used(*map(sum, zip(total, used[0], strict=True)))
    return total


def _messages(devices: int, at_s: float) -> Iterator[IncomingMessage]:
    chance = random.Random(at_s)
    for number in range(devices):
        samples = [[0, name, chance.uniform(*value), "nvml"] for name, value in METRICS.items()]
        body = json.dumps({"schema": "benchd.telemetry/1", "case_id": "vim_tiny,eager,b1", "samples": samples})
        yield IncomingMessage(f"benchd/v1/board-{number:05}/telemetry", body.encode(), at_s + number / devices)


def _cores(used: Used, seconds: int) -> str:
    return f"collector {used.ours_s / seconds:.3f} s, database {used.database_s / seconds:.3f} s"


def _tidy(store: Store, pid: int | None, now_s: float) -> Used:
    with _using(pid) as used:
        store.tidy(now_s)
    return used[0]


@contextmanager
def _using(pid: int | None) -> Iterator[list[Used]]:
    """Yield a list that has what the block has used once it ends."""
    usages: list[Used] = []
    begun = time.monotonic(), _own_s(), _database_s(pid)
    yield usages
    usages.append(Used(time.monotonic() - begun[0], _own_s() - begun[1], _database_s(pid) - begun[2]))


def _own_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _database_s(pid: int | None) -> float:
    if pid is None:
        return 0.0
    processes = [psutil.Process(pid), *psutil.Process(pid).children()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def size_bytes(store: Store, table: str) -> int:
    """Return the bytes of a table with its indices."""
    with store.reading() as connection:
        return int(connection.execute(text(_SIZE[connection.dialect.name]), {"table": table}).scalar_one())


if __name__ == "__main__":
    sys.exit(app())

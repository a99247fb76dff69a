"""What the service's delivery survives, with real processes: kills, an outage, a dead link.

`make soak` takes about an hour; `make test` runs a small one. Exit code 1 where a target is missed.
"""

import json
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import paho.mqtt.client as paho
import typer
from paho.mqtt.enums import CallbackAPIVersion
from rich.console import Console
from rich.table import Table

from benchd.daemon.config import Suite
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.records import OptionValue
from benchd.daemon.service.facts import STATE, Facts
from benchd.daemon.service.schedule import Schedule, begin
from benchd.daemon.verdicts.results import JOURNAL
from benchd.daemon.verdicts.statistics import percentile
from tests.soak.delivery_site import DEVICE, KEEP_ALIVE_S, Result, Site
from tests.soak.nodes import WAIT_S, wait_until
from tests.support.ports import HOST, answers

FILE = "soak.json"
ALIVE_S, DOWN_S = 2.0, 0.5  # at most, between two kills and until what was killed is begun again
GROWTH_BYTES = 20e6
DRAIN_PER_S = 500.0
COMMIT_MS = 15.0
_VICTIMS = ("service", "broker", "collector", "worker", "sampler")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Figure(NamedTuple):
    """One line of the table; `met` is None for a figure without a target."""

    name: str
    value: float
    target: str = ""
    met: bool | None = None


def at_most(name: str, value: float, target: float) -> Figure:
    """Return a figure that must not be larger."""
    return Figure(name, value, f"at most {target:g}", value <= target)


@app.command(epilog='Example: make soak ARGS="--kills 100 --records 10000"')
def main(
    kills: Annotated[int, typer.Option(help="How often something is killed.")] = 1000,
    written: Annotated[int, typer.Option(help="Results that are committed meanwhile, at least.")] = 50_000,
    postgres: Annotated[
        bool, typer.Option("--postgres", help="Store them in a PostgreSQL of its own, and kill it too.")
    ] = False,
    records: Annotated[int, typer.Option(help="Results that wait for a broker that is down.")] = 100_000,
    half_open: Annotated[int, typer.Option(help="How often the link dies without a word.")] = 3,
    seed: Annotated[int, typer.Option(help="Of what is killed when.")] = 0,
    output: Annotated[Path, typer.Option(help=f"Folder of {FILE} and of what the processes keep.")] = Path(
        "bench-out/soak"
    ),
) -> None:
    """Run every part whose number is not 0, print what came of it, and write it in place of its last figures."""
    output = output.resolve()
    parts: dict[str, tuple[int, Callable[[], list[Figure]]]] = {
        "half-open": (half_open, lambda: break_links(output, half_open)),
        "outage": (records, lambda: sit_out(output, records)),
        "kills": (kills, lambda: kill_all(output, kills, written, seed, postgres=postgres)),
    }
    output.mkdir(parents=True, exist_ok=True)
    results = {name: part() for name, (number, part) in parts.items() if number}
    _write(output / FILE, read(output / FILE) | results)
    figures = [figure for part in results.values() for figure in part]
    print_table(figures)
    sys.exit(any(figure.met is False for figure in figures))


def read(path: Path) -> dict[str, list[Figure]]:
    """Return the figures in a file, by part; none where there is no file."""
    parts = json.loads(path.read_text()) if path.exists() else {}
    return {name: [Figure(**figure) for figure in figures] for name, figures in parts.items()}


def _write(path: Path, parts: Mapping[str, Sequence[Figure]]) -> None:
    plain = {name: [figure._asdict() for figure in figures] for name, figures in parts.items()}
    path.write_text(json.dumps(plain, indent=1) + "\n")


def verdict(met: bool | None) -> str:
    """Return whether a target is met, in a word."""
    return "" if met is None else "met" if met else "MISSED"


def print_table(figures: Sequence[Figure]) -> None:
    table = Table("figure", "value", "target", "")
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:,.6g}", figure.target, verdict(figure.met))
    Console(highlight=False).print(table)


def break_links(output: Path, count: int) -> list[Figure]:
    """Stop the service as a network that forwards nothing more does, and take the time until it shows as offline."""
    seconds = []
    with _emptied(output / "half-open") as folder, closing(Site(folder)) as site:
        site.start("broker")
        wait_until(lambda: answers(site.port), "the broker's start")
        for number in range(count):
            typer.echo(f"half-open link {number + 1} of {count}", err=True)
            seconds.append(_offline_s(site))
    return [
        at_most(f"offline after a dead link, s (keep-alive {KEEP_ALIVE_S} s)", max(seconds), 1.5 * KEEP_ALIVE_S + 1)
    ]


def _offline_s(site: Site) -> float:
    with _status(site) as came:
        site.start("service")
        came["online"].wait(WAIT_S)
        site.signal("service", signal.SIGSTOP)
        stopped_s = time.monotonic()
        came["offline"].wait(WAIT_S)
        offline_s = time.monotonic() - stopped_s
    site.kill("service")
    return offline_s


@contextmanager
def _status(site: Site) -> Iterator[dict[str, threading.Event]]:
    """Yield what is set when the device says `online`, and when the broker or it says `offline`."""
    came = {"online": threading.Event(), "offline": threading.Event()}

    def on_message(client: paho.Client, data: None, message: paho.MQTTMessage) -> None:
        if not message.retain:
            came[json.loads(message.payload)["state"]].set()

    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = on_message
    client.connect(HOST, site.port)
    client.subscribe(Topics(DEVICE).of("status"), 1)
    client.loop_start()
    try:
        yield came
    finally:
        client.disconnect()
        client.loop_stop()


def sit_out(output: Path, count: int) -> list[Figure]:
    """Append results while the broker is down, then let a device drain them to a collector."""
    with _emptied(output / "outage") as folder, closing(Site(folder, writes=False)) as site:
        typer.echo(f"an outage of {count} results", err=True)
        commit_ms = sorted(_committed_ms(site, count))
        site.start("writer")
        wait_until(lambda: "mqtt down: " in site.log("writer"), "the writer's start")
        begun_bytes = _forget_peak(site.pid("writer"))
        typer.echo("drained", err=True)
        per_s = _drained_per_s(site, count)
        growth_bytes = _peak_bytes(site.pid("writer")) - begun_bytes
        lost, doubled = _lost_and_doubled(site)
    return [
        Figure("results in the outage", count),
        at_most("lost", lost, 0),
        at_most("stored twice", doubled, 0),
        at_most("memory growth of the device, MB", growth_bytes / 1e6, GROWTH_BYTES / 1e6),
        Figure("drained to the collector, results/s", per_s, f"at least {DRAIN_PER_S:g}", per_s >= DRAIN_PER_S),
        Figure("durable append, median ms", percentile(commit_ms, 50)),
        at_most("durable append, p99 ms", percentile(commit_ms, 99), COMMIT_MS),
    ]


def _committed_ms(site: Site, count: int) -> Iterator[float]:
    result = Result()
    with closing(Log(site.of_writer / JOURNAL)) as log:
        for _ in range(count):
            begun_s = time.perf_counter()
            result.append(log)
            yield (time.perf_counter() - begun_s) * 1e3


def _drained_per_s(site: Site, count: int) -> float:
    """Bring the broker and a collector back, and return the rate from the first stored result to the last.

    mosquitto forgets shared subscriptions when it ends: what is sent before the collector is there comes again later.
    """
    site.signal("writer", signal.SIGSTOP)
    site.start("broker")
    site.start_collecting()
    site.signal("writer", signal.SIGCONT)
    wait_until(lambda: bool(site.stored()), "the first result", step_s=0.01)
    begun_s = time.monotonic()
    wait_until(lambda: len(site.stored()) == count, "the last result", step_s=0.2)
    return count / (time.monotonic() - begun_s)


def _forget_peak(pid: int) -> int:
    """Begin the peak of a process's memory anew and return what it holds now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _peak_bytes(pid)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def kill_all(output: Path, count: int, least: int, seed: int, *, postgres: bool) -> list[Figure]:
    """Kill processes again and again while results are written and measured, and count what is stored in the end."""
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    databases = ("database",) * postgres
    with _emptied(output / "kills") as folder, closing(Site(folder, postgres=postgres)) as site:
        (folder / STATE).write_bytes(msgspec.json.encode(Facts(schedule=_passes())))
        site.start(*databases, "broker", "service", "writer", "collector")
        while killed.total() < count or site.written() < least:
            time.sleep(chance.uniform(0, ALIVE_S))
            victim = chance.choice((*_VICTIMS, *databases))
            typer.echo(f"kill {killed.total() + 1} of at least {count}: {victim}", err=True)
            _kill(site, victim, chance.uniform(0, DOWN_S))
            killed[victim] += 1
        settled_min, lost, doubled = _settle(site)
        written = site.written()
        announced = int(site.log("writer").rpartition("\n")[0].rpartition("\n")[2] or "0")
        measured = len(site.measured())
    return [
        Figure(f"kills ({', '.join(f'{name} {killed[name]}' for name in sorted(killed))})", killed.total()),
        Figure("results written", written),
        Figure("results measured", measured),
        at_most("said to be on the disk and not there", max(0, announced - written), 0),
        at_most("lost", lost, 0),
        at_most("stored twice", doubled, 0),
        Figure("minutes from the last kill to the last result", settled_min),
    ]


def _passes() -> Schedule:
    """Return a schedule of so many short cases that the service has a worker at almost any time."""
    schedule, sizes = Schedule(), list[OptionValue](range(1, 51))
    for _ in range(40):
        suite = Suite(models=["square"], variants=["eager"], options={"size": sizes}, preset="quick")
        schedule = begin(schedule, suite, [f"square,eager,b1,size={size}" for size in sizes], by_command=True)
    return schedule


def _measure_no_more(path: Path) -> None:
    """Take the passes from the facts of a service that is down; what it died in it still reports."""
    facts = msgspec.json.decode(path.read_bytes(), type=Facts)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(facts, schedule=Schedule())))


def _kill(site: Site, victim: str, down_s: float) -> None:
    if victim in ("worker", "sampler"):
        site.kill_child(victim)
        return
    names = ("service", "writer") if victim == "service" else (victim,)
    site.kill(*names)
    time.sleep(down_s)
    site.start(*names)


def _settle(site: Site) -> tuple[float, int, int]:
    """Let everything arrive, as long as more does; return the minutes until then, and how many are lost and doubled.

    Who has waited long tries less often, and who begins at once. The service goes on measuring: what is counted is
    what it has measured by then.
    """
    site.kill("service", "writer", "collector")
    _measure_no_more(site.folder / STATE)
    site.start_collecting()
    site.stop_writing()
    site.start("service", "writer")
    begun_s = arrived_s = time.monotonic()
    least = sys.maxsize
    while True:
        lost, doubled = _lost_and_doubled(site)
        if not lost or time.monotonic() - arrived_s > WAIT_S:
            return (time.monotonic() - begun_s) / 60, lost, doubled
        site.refuse_dead()
        if lost < least:
            least, arrived_s = lost, time.monotonic()
        time.sleep(1.0)


def _lost_and_doubled(site: Site) -> tuple[int, int]:
    wanted = {f"r{number}" for number in range(1, site.written() + 1)} | set(site.measured())
    stored = Counter(site.stored())
    return len(wanted - set(stored)), sum(stored.values()) - len(stored)


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, and take it away unless something went wrong in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


if __name__ == "__main__":
    app()

"""A broker, the service, a writer of results and a collector as real processes on loopback, to be killed at will.

The writer does what the service does with a result, far more often than anything could be measured.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import psutil
import typer
from sqlalchemy import Row, create_engine, text
from sqlalchemy.exc import DBAPIError

from benchd.daemon import records
from benchd.daemon.delivery.log import Log
from benchd.daemon.machine import environment, lock
from benchd.daemon.measuring import recording
from benchd.daemon.measuring.protocol import Outcome
from benchd.daemon.measuring.recording import RunHeader, RunId
from benchd.daemon.records import Case, ProcessResult
from benchd.daemon.verdicts.results import JOURNAL
from benchmarks.commands import command
from tests.soak.board import serve
from tests.soak.nodes import wait_until
from tests.support.ports import HOST, free_port

DEVICE, WRITER, COLLECTOR = "soak", "soak-writer", "store"
RECORD_BYTES = 4900  # of a record that was measured
KEEP_ALIVE_S = 5
POSTGRES = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
PAUSE_S = 0.005  # between two commits
PROMPT_S = 60.0

_BROKER = """listener {port} {host}
allow_anonymous true
max_queued_messages 0
persistence true
persistence_location {folder}/
autosave_interval 1
log_dest file {folder}/mosquitto.log
"""
_SERVICE = """[device]
id = "{device}"

[mqtt]
url = "mqtt://{host}:{port}"
keep_alive_s = {keep_alive_s}

[limits]
warm_up_cap_s = 0.2
measure_cap_s = 0.2
check_images = 1
"""
_COLLECT = """import sys
from benchd.daemon.delivery.broker import parse_url
from benchd.dashboard.collector import run
run(parse_url(sys.argv[1]), *sys.argv[2:])
"""
_CHILDREN = {"worker": "benchd.daemon.worker", "sampler": "benchd.daemon.sampling.sources"}  # of the service
_WRITE = "import sys; from tests.soak.delivery_site import write; write(*sys.argv[1:])"


class EndedByItself(Exception):
    """A process that nobody has killed is gone."""


class Site:
    """The processes by name: `broker service writer collector database`. All that they keep is in `folder`.

    With `postgres` the database is a PostgreSQL of its own, and the writer only delivers if it `writes` nothing.
    """

    def __init__(self, folder: Path, *, writes: bool = True, postgres: bool = False) -> None:
        self.folder, self.of_writer = folder, folder / "writer"
        self.port = free_port()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.of_writer.mkdir(parents=True, exist_ok=True)
        self._configure()
        broker = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin") or sys.exit("needs mosquitto")
        url, python = f"mqtt://{HOST}:{self.port}", sys.executable
        database, store = postgres_in(folder / "database") if postgres else ([], f"sqlite:///{folder / 'store.db'}")
        self._commands = {
            "broker": [broker, "-c", str(folder / "mosquitto.conf")],
            "service": command("benchd", "run", "--config", str(folder / "benchd.toml")),
            "writer": [python, "-c", _WRITE, url, str(self.of_writer), *["written"] * writes],
            "collector": [python, "-c", _COLLECT, url, store, COLLECTOR],
            "database": database,
        }
        self._store = create_engine(store.replace("postgresql:", "postgresql+psycopg:"))

    def _configure(self) -> None:
        broker = _BROKER.format(port=self.port, host=HOST, folder=self.folder)
        # its own user cannot enter the folder
        (self.folder / "mosquitto.conf").write_text(broker + ("user root\n" if os.geteuid() == 0 else ""))
        facts = {"device": DEVICE, "host": HOST, "keep_alive_s": KEEP_ALIVE_S}
        (self.folder / "benchd.toml").write_text(_SERVICE.format(port=self.port, **facts))

    def start(self, *names: str) -> None:
        """Start processes; what they print goes to a file of their name."""
        state = {"STATE_DIRECTORY": str(self.folder), "CACHE_DIRECTORY": str(self.folder / "cache")}
        environment = os.environ | state | {lock.FOLDER_VARIABLE: str(self.folder)}
        for name in names:
            with (self.folder / f"{name}.log").open("ab") as log:
                self._running[name] = subprocess.Popen(
                    self._commands[name],
                    stdout=log,
                    stderr=log,
                    env=environment,
                    user=POSTGRES if name == "database" else None,
                )

    def stop_writing(self) -> None:
        """Let the writer's next life only deliver."""
        self._commands["writer"] = self._commands["writer"][:-1]

    def kill(self, *names: str) -> None:
        """Kill processes; raise EndedByItself for one that is gone already."""
        self._refuse_dead(*names)
        for name in names:
            process = self._running.pop(name)
            # PostgreSQL's own must be gone before it begins again
            children = psutil.Process(process.pid).children() if name == "database" else []
            process.kill()
            process.wait(PROMPT_S)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()

    def kill_child(self, name: str) -> None:
        """Kill the `worker` or the `sampler` of the service, once it has one."""
        wait_until(lambda: self._killed_child(_CHILDREN[name]), f"a {name}")

    def _killed_child(self, module: str) -> bool:
        for child in psutil.Process(self._running["service"].pid).children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if module in child.cmdline():
                    child.kill()
                    return True
        return False

    def _refuse_dead(self, *names: str) -> None:
        for name in names:
            if self._running[name].poll() is not None:
                raise EndedByItself(f"{name}: {self.log(name)[-2000:]}")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a process a signal that does not end it."""
        self._running[name].send_signal(number)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait(PROMPT_S)

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def log(self, name: str) -> str:
        """Return what a process has printed, in all its lives."""
        return (self.folder / f"{name}.log").read_text()

    def start_collecting(self) -> None:
        """Start the collector and wait until the broker knows its session."""
        begun_s = time.time()
        self.start("collector")
        wait_until(lambda: self._heard_s() > begun_s, "the collector's connection")

    def _heard_s(self) -> float:
        """Return when the collector last said that it is connected, in seconds since the epoch."""
        with suppress(DBAPIError):  # the tables are still being made
            ((seen_s,),) = self._rows("SELECT max(seen_s) FROM collector WHERE problem IS NULL")
            return float(seen_s or 0.0)
        return 0.0

    def _rows(self, query: str) -> Sequence[Row[Any]]:
        with self._store.connect() as connection:
            return connection.execute(text(query)).all()

    def written(self) -> int:
        """Return how many results are in the writer's log."""
        with closing(Log(self.of_writer / JOURNAL)) as log:
            return log.last_seq

    def refuse_dead(self) -> None:
        """Raise EndedByItself if any process is gone that nobody has killed."""
        self._refuse_dead(*self._running)

    def measured(self) -> list[str]:
        """Return the run ids that the service has put into its journal."""
        journal = self.folder / JOURNAL
        whole = journal.read_bytes().rpartition(b"\n")[0] if journal.exists() else b""  # a line may be half written
        return [str(msgspec.json.decode(line)["run_id"]) for line in whole.splitlines()]

    def stored(self) -> list[str]:
        """Return the run ids of all results in the collector's store."""
        return [run_id for (run_id,) in self._rows("SELECT run_id FROM result")]


def write(url: str, folder: str, *writes: str) -> None:
    """Deliver a log for ever; if it `writes`, append results to it and print the number of each that is on the disk."""
    result = Result()

    def append(log: Log) -> bool:
        typer.echo(result.append(log))
        return True

    serve(url, folder, WRITER, append if writes else lambda log: False, PAUSE_S)


class Result:
    """A record as a broken-off case leaves it, filled up to the size of a measured one by one long reason."""

    _MARK = "run-id-of-the-soak"

    def __init__(self) -> None:
        run = RunHeader(WRITER, "soak", "soak", version("benchd"), environment.describe("cpu", None))
        bare = self._encoded(run, "")
        self.body = self._encoded(run, "x" * (RECORD_BYTES - len(bare)))

    def _encoded(self, run: RunHeader, reason: str) -> bytes:
        run_id = RunId(self._MARK, "2026-01-01T00:00:00.000Z", 0)
        outcome = Outcome(process=ProcessResult(status="aborted"), missing={"filling": reason})
        return records.encode(recording.record(Case(model="square"), "quick", run, run_id, [outcome]))

    def append(self, log: Log) -> int:
        """Append the next result, whose run id is its number, and return that."""
        return log.append(self.body.replace(self._MARK.encode(), b"r%d" % (log.last_seq + 1)))


def postgres_in(folder: Path) -> tuple[list[str], str]:
    """Make an empty cluster; return the command that serves it and its URL."""
    folder.mkdir()
    if POSTGRES:
        shutil.chown(folder, POSTGRES)
    make = [_program("initdb"), "-D", str(folder), "-U", "benchd", "-A", "trust"]
    make += ["--no-sync", "-E", "UTF8", "--locale=C"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, user=POSTGRES, cwd=folder)
    port = free_port()
    serve = [_program("postgres"), "-D", str(folder), "-k", str(folder), "-h", HOST, "-p", str(port), "-F"]
    return serve, f"postgresql://benchd@{HOST}:{port}/postgres"


def _program(name: str) -> str:
    places = [os.environ["PATH"], *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    return shutil.which(name, path=":".join(places)) or sys.exit(f"needs {name}: apt install postgresql")

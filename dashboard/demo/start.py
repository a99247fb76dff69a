"""`benchd demo`: runs seven simulated boards, `bench-once` on this machine, and the pages, in one command."""

import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from benchd.daemon import records
from benchd.daemon.delivery.broker import Broker
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.machine import interpreter
from benchd.daemon.verdicts.results import JOURNAL
from benchd.dashboard.demo.boards import BOARDS, TICK_S, Messages, SimulatedBoard
from benchd.dashboard.guard import require_free
from benchd.dashboard.messages import TableRow, rows
from benchd.dashboard.store import Store

HOST = "127.0.0.1"
DEVICE = "this-machine"
CONFIG = f"""
[device]
id = "{DEVICE}"

[limits]
warm_up_cap_s = 1.0
measure_cap_s = 2.0
check_images = 2
"""
BENCH_ONCE = "import ctypes; ctypes.CDLL(None).prctl(1, 9); from benchd.daemon.cli import bench_once; bench_once()"
"""The kernel kills it when this process ends: 1 is PR_SET_PDEATHSIG, and 9 is SIGKILL."""

MEASURED = ("--models", "square,snn_onepass", "--preset", "quick")
AT_ONCE = 256  # messages per commit
END_S = 20.0
# variables that would affect parts of the demo: systemd's folders, the token for pages beyond loopback
NOT_PASSED_ON = ("BENCHD_DASHBOARD_TOKEN", "CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET")


def run(port: int, err: TextIO) -> int:
    """Run until SIGINT or SIGTERM and return 0, or 1 if the boards failed; no process is left running."""
    require_free(HOST, port)
    for name in NOT_PASSED_ON:
        os.environ.pop(name, None)
    with TemporaryDirectory(prefix="benchd-demo-") as folder:
        os.environ["NICEGUI_STORAGE_PATH"] = folder
        from benchd.dashboard.app import serve  # noqa: PLC0415 - NiceGUI reads that variable when it is imported

        database = f"sqlite:///{folder}/dashboard.db"
        with closing(Store(database)) as store, closing(_ThisMachine(Path(folder), err)) as this_machine:
            _say(err, "this machine and seven simulated boards; Ctrl-C stops everything")
            boards = _Boards(store, this_machine, err)
            try:
                with suppress(SystemExit, KeyboardInterrupt):  # raised by the pages on SIGTERM and SIGINT
                    # without a broker: the boards write directly to the database that the pages read
                    serve(Broker(HOST, 1883), database, "demo", HOST, port, collect=False)
            finally:
                boards.stop()
    return int(boards.failed)


class _Boards:
    """A thread that writes the boards' messages to the store, from now until `stop`."""

    def __init__(self, store: Store, this_machine: "_ThisMachine", err: TextIO) -> None:
        self._store, self._here, self._err = store, this_machine, err
        self._stopping = threading.Event()
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="benchd.demo", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._play()
        except Exception:
            self.failed = True
            _say(self._err, f"the simulated boards failed\n{traceback.format_exc()}")
            os.kill(os.getpid(), signal.SIGTERM)

    def _play(self) -> None:
        boards = list(map(SimulatedBoard, BOARDS))
        self._add(chain.from_iterable(board.past() for board in boards))
        for tick in count():
            self._add(chain(*(board.tick(tick) for board in boards), self._here.messages()))
            self._store.add([TableRow("collector", {"name": "demo", "seen_s": time.time(), "problem": None})])
            if self._stopping.wait(TICK_S):
                return

    def _add(self, messages: Iterable[IncomingMessage]) -> None:
        left = iter(messages)
        while (part := list(islice(left, AT_ONCE))) and not self._stopping.is_set():
            self._store.add(row for message in part for row in rows(message))


class _ThisMachine:
    """Runs `bench-once` on this machine in a child process, and returns new results on request."""

    def __init__(self, folder: Path, err: TextIO) -> None:
        self._journal, self._log, self._err = folder / DEVICE / JOURNAL, folder / "bench-once.log", err
        self._messages, self._place, self._is_known, self._waits = Messages(DEVICE, "demo"), 0, False, False
        config = folder / "benchd.toml"
        config.write_text(CONFIG)
        given = (*MEASURED, "--wait", "--config", str(config), "--output", str(self._journal.parent))
        with self._log.open("wb") as log:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                interpreter.of_code(BENCH_ONCE, *given),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def messages(self) -> Iterator[IncomingMessage]:
        """Yield the new records and, after the first one, the message that this machine is online."""
        with suppress(FileNotFoundError), self._journal.open("rb") as journal:
            journal.seek(self._place)
            for line in journal:
                if line.endswith(b"\n"):  # otherwise the rest is still being written
                    self._place += len(line)
                    yield from self._result(line[:-1])
        if self._is_known:
            yield self._messages.status("online")
        self._tell_delay()

    def _result(self, line: bytes) -> Iterator[IncomingMessage]:
        record = records.decode(line)
        if not self._is_known:
            self._is_known = True
            yield from self._messages.introduced("This machine", record.environment)
        yield self._messages.result(line, record.run_id)

    def _tell_delay(self) -> None:
        """Report once what the measurement waits for, or why there is none, for example because torch is missing."""
        if self._child is None:
            return
        has_ended = self._child.poll() is not None
        last = "".join(self._log.read_text(errors="replace").splitlines()[-1:])
        if has_ended and not self._is_known:
            _say(self._err, f"this machine is not measured: {last}")
        elif last.startswith("waiting: ") and not self._waits:
            _say(self._err, last)
            self._waits = True
        self._child = None if has_ended else self._child

    def close(self) -> None:
        """End the child and everything that it has started."""
        if self._child is None:
            return
        self._child.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


def _say(err: TextIO, line: str) -> None:
    err.write(f"benchd demo: {line}\n")
    err.flush()

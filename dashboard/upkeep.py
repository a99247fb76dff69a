"""Keeps a collector's process running: one that ends is started again, after growing delays."""

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from benchd.daemon.delivery.broker import Broker
from benchd.daemon.errors import BenchdError
from benchd.dashboard import collector
from benchd.dashboard.notices import Settings

ATTEMPTS = 5  # in a row
LIFE_S = 60.0  # a collector that ends sooner has failed to start
END_S = 10.0


class Upkeep:
    """A collector in a process of its own, from now to `close`; calls `give_up` once it cannot be kept alive."""

    def __init__(
        self, broker: Broker, database: str, name: str, give_up: Callable[[], None], notify: Settings | None = None
    ) -> None:
        self._arguments, self._give_up = (broker, database, name, notify), give_up
        self._closing = threading.Event()
        self._child = self._start()
        self._thread = threading.Thread(target=self._run, name="benchd.upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the collector."""
        self._closing.set()
        self._thread.join()
        self._child.terminate()
        self._child.join(END_S)

    def _start(self) -> BaseProcess:
        """Start a collector that Ctrl-C does not reach: it ends with us, who are interrupted too."""
        self._began_s = time.monotonic()
        child = multiprocessing.get_context("spawn").Process(target=_collect, args=self._arguments, daemon=True)
        resource_tracker.ensure_running()  # unblocks SIGINT if `start` has to start it
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        return child

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            self._child.join(1.0)
            if self._child.exitcode is None:
                continue
            failures = failures + 1 if time.monotonic() - self._began_s < LIFE_S else 1
            ended = f"the collector ended with exit status {self._child.exitcode}"
            if failures == ATTEMPTS:
                sys.stderr.write(f"benchd dashboard: {ended}, {failures} times in a row; giving up\n")
                self._give_up()
                return
            delay_s = 2.0 ** (failures - 1)
            sys.stderr.write(f"benchd dashboard: {ended}; starting it again in {delay_s:g} s\n")
            if not self._closing.wait(delay_s):
                self._try_to_start()

    def _try_to_start(self) -> None:
        try:
            self._child = self._start()
        except OSError as error:  # the earlier child is found ended once more
            sys.stderr.write(f"benchd dashboard: cannot start a collector: {error}\n")


def _collect(broker: Broker, database: str, name: str, notify: Settings | None) -> None:
    try:
        collector.run(broker, database, name, notify)
    except BenchdError as error:
        sys.exit(f"error: {error}")

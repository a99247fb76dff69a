"""What the idle MQTT client of a service costs the case that is timed beside it, as a ratio of times.

Sections of the same work alternate in a random order, with the client connected and held beside them, and with its
process stopped.
"""

import hashlib
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.verdicts.statistics import mean_interval
from tests.soak.board import Board
from tests.soak.delivery_site import DEVICE, Site
from tests.soak.nodes import wait_until
from tests.support.ports import HOST, answers

BUFFER = bytes(8 * 2**20)  # beyond the caches
SECTION_S = 0.5
HEALTH_S = 30.0
READY = "held"
_HOLD = "import sys; from tests.soak.link import hold; hold(*sys.argv[1:])"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog='Example: make bench-link ARGS="--pairs 200"')
def main(pairs: Annotated[int, typer.Option(help="Sections with and without the client.")] = 120) -> None:
    """Print the time of a section with the client over that without it, and the client's processor time."""
    with tempfile.TemporaryDirectory() as folder, _held(Path(folder)) as client:
        repeats = max(1, round(SECTION_S / _section(1)[0]))
        logs: list[tuple[float, float]] = []
        used_s, wall_s = sum(client.cpu_times()[:2]), time.monotonic()
        for _ in range(pairs):
            with_client, without = _pair(client, repeats)
            logs.append((math.log(with_client[0] / without[0]), math.log(with_client[1] / without[1])))
        share = (sum(client.cpu_times()[:2]) - used_s) / (time.monotonic() - wall_s)
    for name, values in zip(("wall time", "processor time"), zip(*logs, strict=True), strict=True):
        interval = mean_interval(values)
        spread = f"{math.exp(interval.low):.5f} to {math.exp(interval.high):.5f}"
        typer.echo(f"{name} with the client over without: {math.exp(sum(values) / pairs):.5f} (95 %: {spread})")
    typer.echo(f"processor time of the client: {100 * share:.4f} % of one core ({pairs} pairs of {SECTION_S} s)")


def hold(url: str, folder: str) -> None:
    """Connect as a service does, and hold the link as while a case is timed."""
    board = Board(parse_url(url), Path(folder), DEVICE)
    wait_until(lambda: board.link.state.connected, "the connection")
    board.link.is_held = True
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    while True:
        time.sleep(HEALTH_S)
        board.attend()


@contextmanager
def _held(folder: Path) -> Iterator[psutil.Process]:
    """Yield the process of a client that is connected and held."""
    site = Site(folder)
    site.start("broker")
    try:
        wait_until(lambda: answers(site.port), "the broker's start")
        command = [sys.executable, "-c", _HOLD, f"mqtt://{HOST}:{site.port}", str(site.of_writer)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            if child.stdout is None or child.stdout.readline().strip() != READY:
                sys.exit("the client did not connect")
            yield psutil.Process(child.pid)
            child.kill()
    finally:
        site.close()


def _pair(client: psutil.Process, repeats: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the seconds of a section with the client and of one without, on the wall and of the processor."""
    seconds = {}
    for is_running in random.sample((True, False), 2):
        client.send_signal(signal.SIGCONT if is_running else signal.SIGSTOP)
        seconds[is_running] = _section(repeats)
    client.send_signal(signal.SIGCONT)
    return seconds[True], seconds[False]


def _section(repeats: int) -> tuple[float, float]:
    wall_s, used_s = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        hashlib.sha256(BUFFER).digest()
    return time.perf_counter() - wall_s, time.process_time() - used_s


if __name__ == "__main__":
    app()

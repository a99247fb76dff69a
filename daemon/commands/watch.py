"""`benchd watch`: shows a fleet in the terminal or, without a broker, this machine's sensors, once per second."""

import select
import sys
import time
import uuid
from contextlib import suppress
from typing import Annotated, TextIO

import typer
from rich.live import Live

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import CaFile, CertificateFile, KeyFile, choices, mqtt_config
from benchd.daemon.delivery.broker import configured
from benchd.daemon.errors import needing
from benchd.daemon.machine import ticker
from benchd.daemon.machine.signals import as_interrupt
from benchd.daemon.records import SamplerReport, Summary, Window
from benchd.daemon.reporting.console import console_on
from benchd.daemon.reporting.sensors_table import sensors
from benchd.daemon.sampling import sources
from benchd.daemon.sampling.child import SamplerProcess

PERIOD_S = 0.1
SHOWN_S = 1.0

app = application()


@app.command(epilog="Example: benchd watch --mqtt mqtt://collector@broker.local")
def watch(
    mqtt: Annotated[str | None, typer.Option(help="The fleet's broker.", metavar="mqtt://HOST[:PORT]")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this many seconds (default: until Ctrl-C).", min=0)
    ] = None,
    device: Annotated[str, typer.Option(help="Without a broker: the device to watch.", metavar="cpu|cuda")] = "cpu",
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
) -> None:
    """Show a fleet, or this machine's sensors, in a terminal."""
    settings = mqtt_config(mqtt, ca_file, certificate_file, key_file)
    kind = choices("device", [device], ["cpu", "cuda"])[0]
    if mqtt:
        with needing("dashboard"):
            from benchd.dashboard.watch import watch as watch_fleet  # noqa: PLC0415
        with suppress(KeyboardInterrupt):
            watch_fleet(configured(mqtt, settings), f"benchd-watch-{uuid.uuid4().hex[:12]}", sys.stdout, seconds)
    else:
        with suppress(BrokenPipeError):  # unlike other commands, it ends when its reader does
            watch_sensors(sources.present(kind), seconds, sys.__stdout__ or sys.stdout)


def watch_sensors(sources: list[str], seconds: float | None, out: TextIO) -> None:
    """Show every metric of the last second until Ctrl-C or for `seconds`, as plain lines if `out` is not a terminal."""
    console = console_on(out)
    until = time.monotonic() + seconds if seconds is not None else float("inf")
    screen = Live(console=console, auto_refresh=False)
    with suppress(KeyboardInterrupt), as_interrupt(), SamplerProcess(sources, PERIOD_S) as sampler, screen:
        while time.monotonic() < until:
            summaries, report = _next(sampler)
            ticker.show(sys.stderr, "")  # `out` does not make room for it
            if out.isatty():
                screen.update(sensors(summaries, report, console.width), refresh=True)
            else:
                out.write("  ".join(f"{name}={summary.mean:.6g}" for name, summary in sorted(summaries.items())) + "\n")
                out.flush()


def _next(sampler: SamplerProcess) -> tuple[dict[str, Summary], SamplerReport]:
    """Collect samples for one second and return their values."""
    start_ns = time.monotonic_ns()
    deadline = time.monotonic() + SHOWN_S
    while (left_s := deadline - time.monotonic()) > 0:
        if select.select([sampler], [], [], left_s)[0]:
            sampler.receive()
    sampler.flush()
    samples = sampler.cut(Window(start_ns, time.monotonic_ns()))
    sampler.samples.drop_before(start_ns)
    return samples

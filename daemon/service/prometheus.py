"""A text file for node_exporter's textfile collector: the health of the service and of deployed folders."""

from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from benchd.daemon.delivery.messages import DeployedFolder, Health
from benchd.daemon.machine import folders

GAUGES = {
    "uptime_seconds": ("uptime_s", "Time since the service started."),
    "resident_bytes": ("rss_bytes", "Resident memory of the service."),
    "pending": ("pending", "Results and events that no broker has acknowledged."),
    "refused": ("refused", "Results and events that the broker refuses."),
    "cases_left": ("cases_left", "Remaining cases of the current runs."),
    "telemetry_dropped": ("telemetry_dropped", "Telemetry batches not sent in time."),
}


def write(path: Path, health: Health, deployed: Sequence[DeployedFolder] = ()) -> None:
    """Replace the file atomically, so that node_exporter never reads a partial one; raise OSError if that fails."""
    registry = CollectorRegistry()
    for name, (field, text) in GAUGES.items():
        Gauge(f"benchd_{name}", text, registry=registry).set(getattr(health, field))
    Gauge("benchd_problem", "1 while something is wrong.", registry=registry).set(health.problem is not None)
    is_kept = Gauge("benchd_shipped_kept", "0 while a shipped folder breaks its promise.", ["name"], registry=registry)
    ratio = Gauge("benchd_shipped_ratio", "Current time divided by the promised time.", ["name"], registry=registry)
    for folder in deployed:
        is_kept.labels(folder.name).set(not folder.is_broken)
        if folder.change is not None:
            ratio.labels(folder.name).set(1.0 + folder.change)
    folders.replace(path, [generate_latest(registry)], mode=0o644)

"""A text file for node_exporter's textfile collector: the health of the service."""

from pathlib import Path

from benchd.daemon.delivery.messages import Health

GAUGES = {
    "uptime_seconds": ("uptime_s", "How long the service has run."),
    "resident_bytes": ("rss_bytes", "Resident memory of the service."),
    "outbox_pending": ("outbox_pending", "Messages that no broker has acknowledged."),
    "outbox_unstored": ("outbox_unstored", "Results that no collector has stored."),
    "outbox_refused": ("outbox_refused", "Messages that the broker refuses."),
    "outbox_bytes": ("outbox_bytes", "Space that the outbox uses."),
    "cases_left": ("cases_left", "Cases of the passes that have begun."),
    "telemetry_dropped": ("telemetry_dropped", "Batches of telemetry that were not sent in time."),
}


def write(path: Path, health: Health) -> None:
    """Replace the file as a whole, so that node_exporter never reads half of it; raise OSError where that fails."""
    lines = []
    for name, (field, text) in GAUGES.items():
        value = getattr(health, field)
        lines += [f"# HELP benchd_{name} {text}", f"# TYPE benchd_{name} gauge", f"benchd_{name} {value}"]
    lines += ["# HELP benchd_problem 1 while something is wrong.", "# TYPE benchd_problem gauge"]
    lines.append(f"benchd_problem {int(health.problem is not None)}")
    part = path.with_name(f".{path.name}.part")
    part.write_text("\n".join(lines) + "\n")
    part.chmod(0o644)
    part.replace(path)

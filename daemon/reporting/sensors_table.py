"""The live table of a machine's sensors: any clock throttling first, in readable units."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from benchd.daemon.records import SamplerReport, Summary, throttles
from benchd.daemon.reporting.results_table import figure
from benchd.daemon.reporting.tables import ALARM, cut, figures, light

UNITS = {
    "_w": ("W", 1.0),
    "_j": ("J", 1.0),
    "_hz": ("MHz", 1e-6),
    "_c": ("°C", 1.0),
    "_bytes": ("MiB", 2.0**-20),
    "_percent": ("%", 1.0),
    "_rpm": ("rpm", 1.0),
}
"""The displayed unit and the factor for converting to it, by the suffix of a metric's name."""

ALL_COLUMNS = 80  # minimum terminal width for showing the extremes and the source too


def sensors(summaries: Mapping[str, Summary], report: SamplerReport, width: int) -> Table:
    """Return the table of the last second."""
    is_wide = width >= ALL_COLUMNS
    table = light("metric", *figures("mean"), *(figures("lowest", "highest") if is_wide else []))
    if is_wide:
        table.add_column("source", no_wrap=True)
    for name, summary in sorted(summaries.items(), key=lambda item: (not _is_throttled(*item), item[0])):
        others = [_reading(name, summary.minimum), _reading(name, summary.maximum), cut(summary.source, 10)]
        cells = [cut(_label(name), width // 3), _state(name, summary)]
        table.add_row(*map(Text, cells + others * is_wide), style=ALARM if _is_throttled(name, summary) else "")
    failures = "\n".join(f"{source}: {failure}" for source, failure in report.failures.items())
    table.caption, table.caption_justify = Text(failures or "Ctrl-C to stop"), "left"
    return table


def _label(name: str) -> str:
    metric, _, rail = name.partition("@")
    ending = next((unit for unit in UNITS if metric.endswith(unit)), "")
    return f"{metric.removesuffix(ending).replace('_', ' ')} {rail}".rstrip()


def _reading(name: str, value: float) -> str:
    metric = name.partition("@")[0]
    unit, factor = next((unit for ending, unit in UNITS.items() if metric.endswith(ending)), ("", 1.0))
    return f"{figure(value * factor)} {unit}".rstrip()


def _is_throttled(name: str, summary: Summary) -> bool:
    return "throttle_reasons" in name and throttles(summary.maximum)


def _state(name: str, summary: Summary) -> str:
    if "throttle_reasons" in name:
        return "THROTTLED" if _is_throttled(name, summary) else "none"
    return _reading(name, summary.mean)

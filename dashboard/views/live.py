"""Live charts of a device: a browser receives only the points that it does not have yet."""

from typing import Any

from nicegui import ui

from benchd.dashboard.queries import Mark
from benchd.dashboard.views import charts
from benchd.dashboard.views.charts import PANELS, Series

POINTS = 600  # maximum per line, as many as a screen can show
LATE_S = 5.0  # how late a sample may arrive

ui.echart  # noqa: B018 - makes its library known to the browser


class LiveCharts(ui.element, component="live_charts.js"):
    """A chart for each kind of metric, for the last `span_s`; they share crosshair and zoom."""

    def __init__(self, span_s: float) -> None:
        super().__init__()
        panels = [{"title": title, "unit": unit, "options": charts.base(unit)} for title, unit, _, _ in PANELS]
        self._props["panels"] = panels
        self.begin(span_s)

    def begin(self, span_s: float) -> None:
        """Forget what has been sent."""
        self._span_s, self._is_new = span_s, True
        self._last_s: dict[str, float] = {}
        self._reasons: Series = {}
        self._lines: dict[str, Any] = {}

    def since_s(self, now_s: float) -> float:
        """Return the time from which samples are needed."""
        return max(max(self._last_s.values(), default=0.0) - LATE_S, now_s - self._span_s)

    def extend(self, series: Series, marks: list[Mark], now_s: float) -> bool:
        """Send new points, and the end of lines that have left the span; return whether any line is left."""
        fresh = {name: self._fresh(name, values) for name, values in series.items()}
        gone = [name for name, last_s in self._last_s.items() if last_s < now_s - self._span_s]
        for name in gone:
            del self._last_s[name]
        points = [_of_panel(fresh, factor, ending) for _, _, factor, ending in PANELS]
        lines = {"markLine": charts.boundaries(marks), "markArea": charts.bands(self._throttled(series, now_s))}
        changed = lines if lines != self._lines else None
        if changed or any(points) or gone or self._is_new:
            update = {"points": points, "lines": changed, "until": now_s * 1e3, "span": self._span_s * 1e3}
            self.run_method("extend", update | {"isNew": self._is_new})
        self._lines, self._is_new = lines, False
        return bool(self._last_s)

    def _fresh(self, name: str, values: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the values since the last one sent, no closer together than a screen can show."""
        lines = []
        for t_s, value in values:
            if t_s >= self._last_s.get(name, 0.0) + self._span_s / POINTS:
                self._last_s[name] = t_s
                lines.append((t_s, value))
        return lines

    def _throttled(self, series: Series, now_s: float) -> list[tuple[float, float]]:
        for name in self._reasons | series:
            if "throttle_reasons" in name:
                known = dict(self._reasons.get(name, [])) | dict(series.get(name, []))
                self._reasons[name] = [point for point in sorted(known.items()) if point[0] > now_s - self._span_s]
        return charts.throttled(self._reasons)


def _of_panel(fresh: Series, factor: float, ending: str) -> dict[str, list[list[float]]]:
    """Return a panel's new points by the name of their line, with times in milliseconds and in the panel's unit."""
    wanted = {name: values for name, values in fresh.items() if name.partition("@")[0].endswith(ending) and values}
    return {
        name.partition("@")[2] or name: [[round(t_s * 1e3), float(f"{value * factor:.4g}")] for t_s, value in values]
        for name, values in sorted(wanted.items())
    }

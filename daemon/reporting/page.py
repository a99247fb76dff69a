"""The frame of a page that needs no network: its style, its charts and their script, light or dark."""

from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

Chart = dict[str, Any]
"""`title`, `note`, and plotly's `data` and `layout`; one without data shows its note alone."""

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --grid: #ddd; }
@media (prefers-color-scheme: dark) { :root { --grid: #444; } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--grid); text-align: left; white-space: nowrap; }
.wide { overflow-x: auto; }
.chart { height: 26rem; }
.ship li { font-family: ui-monospace, monospace; white-space: pre-wrap; }
td.figure, th.figure { text-align: right; }
td.name { min-width: 12rem; max-width: 34rem; white-space: normal; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
"""
CHARTS = """{% for chart in charts %}
<h2>{{ chart.title }}</h2>
<p>{{ chart.note }}</p>
{% if chart.data %}<div class="chart" id="chart{{ loop.index0 }}"></div>{% endif %}
{% endfor %}
"""
FOOT = """<script>{{ plotly }}</script>
<script>
const charts = {{ charts|tojson }};
function draw() {
  const style = getComputedStyle(document.body), grid = style.getPropertyValue("--grid").trim();
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true };
  charts.forEach((chart, place) => {
    if (!chart.data.length) return;
    Plotly.react("chart" + place, chart.data, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style.color },
      margin: { t: 10, r: 10 }, ...chart.layout,
      xaxis: { ...axis, ...chart.layout.xaxis }, yaxis: { ...axis, ...chart.layout.yaxis },
    }, { responsive: true, displayModeBar: false });
  });
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
</script>
</body>
</html>
"""


def render(title: str, body: str, charts: Sequence[Chart], **values: object) -> str:
    """Return the page of this body, a template that holds `CHARTS` where they go; every value is escaped."""
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(HEAD + body + FOOT)
    plotly = Markup(get_plotlyjs())  # noqa: S704 - the library's own text, which must not be escaped
    return template.render(title=title, charts=charts, plotly=plotly, **values)

"""The frame of a self-contained page: style, charts and their script, in light or dark mode."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchd.daemon.reporting.palette import BAD, SERIES

Chart = dict[str, Any]
"""`title`, `note`, and the `data` and `layout` that charts.js draws; charts without data are left out."""

FOLDER = Path(__file__).with_name("templates")


def render(template: Path, title: str, charts: Sequence[Chart], **values: object) -> str:
    """Return the page for a template that extends `page.html`; every value is escaped."""
    loader = jinja2.FileSystemLoader([template.parent, FOLDER])
    pages = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    drawn = [chart for chart in charts if chart["data"]]
    given = {"title": title, "charts": drawn, "colours": SERIES, "bad": BAD}
    return pages.get_template(template.name).render(**given, **values)

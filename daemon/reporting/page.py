"""The frame of a self-contained page: style, charts and their script, light or dark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchd.daemon.reporting.palette import BAD, COLOURS

Chart = dict[str, Any]
"""`title`, `note`, and the `data` and `layout` that charts.js draws; one without data shows its note alone."""

FOLDER = Path(__file__).with_name("templates")


def render(template: Path, title: str, charts: Sequence[Chart], **values: object) -> str:
    """Return the page of this template, which extends `page.html`; every value is escaped."""
    loader = jinja2.FileSystemLoader([template.parent, FOLDER])
    pages = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    colours = {"colours": COLOURS, "bad": BAD}
    return pages.get_template(template.name).render(title=title, charts=charts, **colours, **values)

"""Results as CSV, for spreadsheets: one flat row per record, with units in the column names."""

import csv
import io
from collections.abc import Iterator

from benchd.daemon.verdicts.rows import spreadsheet
from benchd.dashboard.messages import Result
from benchd.dashboard.queries import Filter, after
from benchd.dashboard.store import Store

ROWS = 1000  # rows per query; a fleet's history need not fit in memory


def lines(store: Store, which: Filter) -> Iterator[str]:
    """Yield the header, then the results in order of arrival."""
    yield _line(Result._fields)
    last = 0
    while page := after(store, which, last, ROWS):
        yield "".join(_line([spreadsheet(value) for value in result]) for result in page.values())
        last = max(page)


def _line(cells: object) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerow(cells)  # type: ignore[arg-type]
    return out.getvalue()

"""Fits tables to the terminal's width: figures are never cut or broken; rows that do not fit become blocks of lines."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

ALARM, GOOD = "bold red", "green"

Cell = str | Text
"""The content of a cell, which is never interpreted as markup."""


def figures(*headings: str) -> list[str | Column]:
    """Return right-aligned columns."""
    return [Column(heading, justify="right") for heading in headings]


def print_rows(
    console: Console, columns: Sequence[str | Column], rows: Sequence[Sequence[Cell]], title: str = ""
) -> None:
    """Print one row per item if every cell except the first fits unbroken, else one block of lines per item.

    The first cell of a row is the item's name; in a table it may wrap between words.
    """
    table = Table(*columns, title=Text(title) if title else None, title_justify="left", title_style="")
    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    for place, column in enumerate(table.columns):
        column.no_wrap = place > 0
    for row in texts:
        table.add_row(*row)
    if _least_width([[Text(str(column.header)) for column in table.columns], *texts]) <= console.width:
        console.print(table)
        return
    if title:
        console.print(Text(title))
    for row in texts:
        console.print(_block([str(column.header) for column in table.columns[1:]], row, console.width))


def _least_width(rows: Sequence[Sequence[Text]]) -> int:
    """Return the minimum width of a table with these rows, in which only the first column wraps."""
    names, *others = zip(*([cell.plain for cell in row] for row in rows), strict=True)
    unbroken = [" ".join(names).split(), *others]
    return sum(max(map(cell_len, column)) for column in unbroken) + 3 * len(unbroken) + 1


def _block(headings: Sequence[str], row: Sequence[Text], width: int) -> Text:
    """Return a row as lines: its name, then a heading and a cell per line."""
    longest = max(map(len, headings))
    name, *cells = row
    lines = [
        Text.assemble(f"  {heading:<{longest}}  ", cell) for heading, cell in zip(headings, cells, strict=True) if cell
    ]
    return Text("\n").join([breakable(name, width), *lines])


def breakable(name: Text, width: int) -> Text:
    """Return a name that can wrap after its commas if one of its words is longer than a line."""
    is_long = any(len(word) > width for word in name.plain.split())
    return Text(name.plain.replace(",", ", "), name.style) if is_long else name


def cut(text: str, width: int) -> str:
    """Return the text if it fits, else as many whole words as fit and an ellipsis; numbers are never shortened."""
    if cell_len(text) <= width:
        return text
    words = re.findall(r"[\s,;/-]*[^\s,;/-]+", text)
    beginning = ""
    while words and cell_len(beginning) + cell_len(words[0]) < width:
        beginning += words.pop(0)
    return f"{beginning}…"


def light(*columns: str | Column) -> Table:
    """Return a table without a frame, whose cells stay on one line."""
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    return table


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int | None = None) -> Iterator[str]:
    """Yield the lines of a Markdown table; columns after the first `words` contain numbers and are right-aligned."""
    left = len(headings) if words is None else words
    sides = ["---"] * left + ["---:"] * (len(headings) - left)
    return (f"| {' | '.join(map(escaped, row))} |" for row in chain((headings, sides), rows))


def escaped(text: str) -> str:
    """Return the text escaped for a table cell in Markdown."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

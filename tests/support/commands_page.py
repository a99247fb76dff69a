"""docs/commands.md from the commands, each option where it first occurs: `python tests/support/commands_page.py`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from typer.core import TyperGroup

from benchd.daemon import cli

PAGE = Path(__file__).parents[2] / "docs/commands.md"
TYPE = re.compile(r" <.*>")
HEAD = """# Commands

Every command and option, as `--help` prints them. An option that several commands share is described at the first.
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command by its line, a group before what is in it."""
    for line in ("bench-once", *(f"benchd {verb}" for verb in cli.VERBS)):
        command = cli.command("once" if line == "bench-once" else line.removeprefix("benchd "))
        yield line, command
        subcommands = command.commands if isinstance(command, TyperGroup) else {}
        yield from ((f"{line} {name}", part) for name, part in subcommands.items())


def page() -> str:
    """Return the page."""
    described: dict[tuple[str, str], str] = {}
    return "\n".join([HEAD, *(_section(line, command, described) for line, command in commands())])


def _section(line: str, command: Any, described: dict[tuple[str, str], str]) -> str:
    """Return the part of a command; note in `described` where each of its options is."""
    context = click.Context(command, info_name=line)
    usage = " ".join(command.collect_usage_pieces(context)).removeprefix("[OPTIONS]").strip()
    example = (command.epilog or "").removeprefix("Example: ")
    lines = [f"## {line}", "", *([f"`{line} {usage}`", ""] if usage else []), *(command.help or "").splitlines(), ""]
    rows: list[str] = []
    elsewhere: dict[str, list[str]] = {}
    arguments_first = sorted(command.get_params(context), key=lambda parameter: parameter.param_type_name)
    for record in filter(None, (parameter.get_help_record(context) for parameter in arguments_first)):
        if "--help" in record[0]:
            continue
        first = described.setdefault(record, line)
        if first == line:
            rows.append(f"- `{TYPE.sub('', record[0])}`: {record[1]}")
        else:
            elsewhere.setdefault(first, []).append(f"`{record[0].split()[0]}`")
    for first, names in elsewhere.items():
        rows.append(f"- as in [{first}](#{first.replace(' ', '-')}): {', '.join(names)}")
    return "\n".join([*lines, *rows, *([""] if rows else []), f"Example: `{example}`", ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

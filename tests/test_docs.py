"""The documents against the code: every field, option, topic and command that is there, and no other."""

import re
from itertools import pairwise
from pathlib import Path
from typing import get_args

import click
import msgspec
import pytest
import typer
from typer.core import TyperGroup

from benchd.daemon import cli, config
from benchd.daemon.commands.command import GROUPS, MOST_TOGETHER
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import PRESETS, Machine
from benchd.daemon.records import Record, all_variants
from benchd.daemon.verdicts.doubts import PLAIN
from benchd.daemon.verdicts.effects import FEWEST_PROCESSES
from benchd.exporters import tegra
from benchd.models.catalog import MODELS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def document(name):
    return (DOCS / name).read_text()


def structs(kind):
    """Yield a Struct and all that its fields hold."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from structs(field.type)
    for inner in get_args(kind):
        yield from structs(inner)


def test_every_field_of_a_record_is_described():
    text = document("records.md")
    names = {field.encode_name for kind in structs(Record) for field in msgspec.structs.fields(kind)}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_doubt_that_is_printed_is_explained():
    text = document("records.md")
    assert [words for words in PLAIN.values() if f"({words})" not in text] == []


def commands():
    """Yield every command by its line, a group before what is in it."""
    for line in ("bench-once", *(f"benchd {verb}" for verb in cli.VERBS)):
        command = cli.command("once" if line == "bench-once" else line.removeprefix("benchd "))
        yield line, command
        subcommands = command.commands if isinstance(command, TyperGroup) else {}
        yield from ((f"{line} {name}", part) for name, part in subcommands.items())


def test_every_command_has_an_example_of_itself():
    assert [line for line, command in commands() if line not in (command.epilog or "")] == []


def test_the_help_of_no_command_has_a_group_of_more_than_twelve_and_no_group_names_what_is_no_option():
    known = set()
    for line, command in commands():
        context = click.Context(command, info_name=line)
        known |= {name.removeprefix("--") for parameter in command.params for name in parameter.opts}
        groups = re.split(r"^([A-Z][\w ]+):$", command.get_help(context), flags=re.MULTILINE)
        sizes = {group: len(re.findall(r"^  -", text, re.MULTILINE)) for group, text in pairwise(groups)}
        assert max(sizes.values(), default=0) <= MOST_TOGETHER, (line, sizes)
    assert set(" ".join(GROUPS.values()).split()) - known == set()


def test_no_summary_in_the_help_is_cut_and_no_usage_nests_brackets_before_dots():
    group = typer.main.get_command(cli._benchd)
    printed = [
        group.get_help(click.Context(group)),
        *(command.get_usage(click.Context(command)) for _, command in commands()),
    ]
    assert [text for text in printed if re.search(r"\w\.\.\.|\]\]\.\.\.", text)] == []


def test_the_help_of_no_command_shows_a_type_of_python():
    texts = {line: command.get_help(click.Context(command, info_name=line)) for line, command in commands()}
    types = r"<\w.*>|\b(TEXT|INTEGER|FLOAT|BOOLEAN|list\[)"
    assert {line: matches for line, text in texts.items() if (matches := re.findall(types, text))} == {}


def test_the_sample_configuration_is_read_and_shows_every_key():
    sample = config.read(DOCS / "benchd.toml")
    assert plan.plan(sample.suite, sample.limits, Machine("cpu", has_cxx=True))
    text = document("benchd.toml")
    keys = [field.encode_name for kind in structs(config.Config) for field in msgspec.structs.fields(kind)]
    assert [key for key in keys if not re.search(rf"\b{key}\b", text)] == []
    assert f"with fewer than {FEWEST_PROCESSES} a result is never called slower" in text
    assert (sample.sampling, sample.limits) == (config.SamplingConfig(), config.LimitsConfig())


def test_every_model_variant_and_option_is_described():
    text = document("models.md")
    assert [name for name in MODELS if f"`{name}`" not in text] == []
    options = {option for model in MODELS.values() for option in model.options} - {"scan", "size"}
    assert [option for option in sorted(options) if f"`{option}`" not in text] == []
    names = [
        v.name for v in all_variants() if plan.why_not(plan.Case(model="", variant=v), Machine("cpu", True)) is None
    ]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_topic_is_the_one_in_the_code():
    assert f"`{Topics('x').result('y').replace('x', '<device_id>', 1)[:-1]}<run_id>`" in document("topics.md")


@pytest.mark.parametrize("name", PRESETS)
def test_the_preset_table_is_the_code_s(name):
    limits = PRESETS[name]
    rule = limits.rule
    half_width = "- (uses the cap)" if rule.half_width is None else f"{100 * rule.half_width:g} %"
    row = f"| `{name}` | {limits.processes} | {limits.warm_up_cap_s:g} s | {rule.cap_s:g} s | "
    block = f"each {rule.min_block_runs} run or {rule.min_block_s:g} s, whichever is longer"
    row += f"at least {rule.min_blocks}, {block} | {half_width} |"
    assert row in document("measuring.md")


def anchors(page):
    """Return the anchors of a page: its headings as GitHub links them, and those set by hand."""
    text = re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings} | {
        *re.findall(r'<a id="(.+?)">', text)
    }


def test_links_inside_the_repository_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or there.suffix != ".md" or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_every_promise_of_the_reliability_page_has_its_tests():
    promises = document("reliability.md").partition("\n## ")[0]
    rows = re.findall(r"^\| (?!---|promise )(.+) \|(.*)\|$", promises, re.MULTILINE)
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}

    def is_there(name):
        test, _, case = name.rstrip("]").partition("[")
        return ROOT / name in files or any(f"def {test}(" in text and case in text for text in files.values())

    named = {promise: re.findall(r"`([^`]*)`", tests) for promise, tests in rows}
    assert len(named) == 10
    assert [name for tests in named.values() for name in tests or ["no test"] if not is_there(name)] == []


def test_the_page_on_boards_has_the_table_of_releases():
    rows = [
        f"| {known.jetpack} | {', '.join(f'R{version}' for version in known.l4t)} | "
        f"{known.ubuntu}, {known.python}, {known.cuda} | `{known.index}` |"
        for known in reversed(tegra.RELEASES)
    ]
    assert "\n".join(rows) in document("jetson.md")
    assert len(document("jetson.md").split()) <= 900
